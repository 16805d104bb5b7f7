"""What bad contributors can do to a hub and to its devices, end to end in one process: store, builder, bundle, device.

python scripts/attacks.py                      # fashion-bn, severity 5, mean of three domains; 25 minutes
python scripts/attacks.py --suite fashion-vit  # another family
python scripts/attacks.py '^(?!adaptive)'      # rows whose name this pattern is found in
python scripts/attacks.py --unforeseen         # nobody has thought of the corruptions of the targets
python scripts/attacks.py --no-probes          # as `mergetta hub serve --no-probe`, without images to try experts on

Honest experts are those of the 14 other domains, one contributor each unless told (`attackers.py` says who is not).
The hub has its default settings and 32 clean images (`mergetta hub probe`). `merge` is the error of the bundle's start
with the statistics of batches of 200, as in the paper; `device` that of race-merge with its default settings, in
batches of 64, over four orders of the images.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from attackers import Attacker, Vector

from mergetta import Bundle, Expert, MergettaError, RaceMerge, TorchRuntime, build_bundle
from mergetta.bench.inputs import clean_images, family_of, place_of, target_of, training_of
from mergetta.bench.pools import make_expert
from mergetta.bench.protocol import device_model, measured
from mergetta.bench.store import Store as Results
from mergetta.bench.store import default_cache
from mergetta.bench.suite import load_suite
from mergetta.data.corruptions import CORRUPTIONS
from mergetta.family_file import FamilyFile
from mergetta.groups import moment_pairs
from mergetta.hub.builder import Builder
from mergetta.hub.probes import COUNT, ProbeFile
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store

PARSER = argparse.ArgumentParser()
PARSER.add_argument("wanted", nargs="?", default="", help="rows whose name this pattern is found in")
PARSER.add_argument("--suite", default="fashion-bn")
PARSER.add_argument("--severity", type=int, default=5)
PARSER.add_argument("--targets", nargs="+", default=["fog", "gaussian_noise", "pixelate"])
PARSER.add_argument("--no-probes", action="store_true", help="a hub that tries experts on no images")
PARSER.add_argument("--unforeseen", action="store_true", help="no views have the corruptions of the targets")
PARSER.add_argument("--orders", type=int, default=4, help="of the images, for the device")
OPTIONS = PARSER.parse_args()
TARGETS = tuple(OPTIONS.targets)
SUITE = load_suite(OPTIONS.suite).restricted(samples=1000, severity=OPTIONS.severity)
SUITE = SUITE.model_copy(update={"expert_samples": 3000})
RUNTIME = TorchRuntime(family_of(SUITE))
SOURCE = measured("features", place_of(SUITE), 64, None)
"""What features look like on clean images: an exported model has it, for families without BatchNorm."""
BASE = RUNTIME.groups
VIEWS = [name for name in CORRUPTIONS if not OPTIONS.unforeseen or name not in TARGETS]
Upload = tuple[str, Expert]
"""A token, and what it uploads."""


def probe_file() -> ProbeFile:
    """Of clean images that no target and no expert has seen."""
    found = clean_images(place_of(SUITE), COUNT)
    assert found is not None
    return ProbeFile.of_images(device_model(place_of(SUITE), False), np.asarray(found.images), VIEWS)


def each(experts: Sequence[Expert], name: str) -> list[Upload]:
    """One contributor per expert."""
    return [(f"{name}-{i}", expert) for i, expert in enumerate(experts)]


def one(experts: Sequence[Expert], name: str) -> list[Upload]:
    return [(name, expert) for expert in experts]


def drift(attacker: Attacker, vector: Vector) -> list[list[Upload]]:
    """Three tokens, 80 uploads each: step by step from honest to three times as long as crafted; a build after 15."""
    found = []
    for i in range(80):
        share = (i + 1) / 80
        for token in range(3):
            start = attacker.task(attacker.honest[token])
            moved = {n: (1 - share) * start[n] + 3 * share * vector[n] for n in vector}
            found.append((f"drift-{token}", attacker.with_task(attacker.honest[token], moved, f"drift-{token}-{i}")))
    return [found[i : i + 15] for i in range(0, len(found), 15)]


Attack = Callable[[list[Expert], Attacker, Vector], list[list[Upload]]]
"""Honest experts, an attacker and its vector → rounds of uploads, with a build after each."""


def attacks() -> Iterator[tuple[str, Attack, bool]]:
    """(name, uploads, whether the hub is open)."""
    yield "clean pool", lambda h, a, v: [each(h, "honest")], True
    for n in (15, 50):
        yield f"{n} crafted by one token", lambda h, a, v, n=n: [each(h, "honest"), one(a.uploads(n, v), "evil")], True
    yield "two tokens in all, 15 of −20 ×", lambda h, a, v: [
        one(h, "honest") + one([a.scaled(h[i % len(h)], -20, f"evil-{i}") for i in range(15)], "evil")
    ], True  # fmt: skip
    yield "4 crafted first, by one token, alone", lambda h, a, v: [one(a.uploads(4, v), "evil")], True
    yield "… after 14 honest ones", lambda h, a, v: [one(a.uploads(4, v), "evil"), each(h, "honest")], True
    yield "… the hub not open", lambda h, a, v: [one(a.uploads(4, v), "?evil"), each(h, "honest")], False
    yield "31 negated by one token first", lambda h, a, v: [
        one([a.scaled(h[i % len(h)], -1 - i / 100, f"evil-{i}") for i in range(31)], "evil"), each(h, "honest")
    ], True  # fmt: skip
    yield "20 Sybil tokens against 14", lambda h, a, v: [each(h, "honest"), each(a.uploads(20, v), "?evil")], False
    yield "… all of them approved", lambda h, a, v: [each(h, "honest"), each(a.uploads(20, v), "evil")], True
    yield "slow drift by 3 tokens", lambda h, a, v: [each(h, "honest"), *drift(a, v)], True
    yield "own: 6 crafted, 6 tokens of 20", lambda h, a, v: [each(h, "honest"), each(a.uploads(6, v), "evil")], True
    yield "own: 6 of 20, told apart from one another", lambda h, a, v: [
        each(h, "honest"), each(a.told_apart(6), "evil")
    ], True  # fmt: skip
    yield "own: 9 of 23, as like the others as honest ones", lambda h, a, v: [
        each(h, "honest"), each(a.uploads(9, a.craft(0.75)), "evil")
    ], True  # fmt: skip
    yield "own: 13 crafted, 13 tokens of 27", lambda h, a, v: [each(h, "honest"), each(a.uploads(13, v), "evil")], True
    yield "own: 13 of 27, as like the others as honest ones", lambda h, a, v: [
        each(h, "honest"), each(a.uploads(13, a.craft(0.75)), "evil")
    ], True  # fmt: skip
    yield "own: 13 of 27, told apart from one another", lambda h, a, v: [
        each(h, "honest"), each(a.told_apart(13), "evil")
    ], True  # fmt: skip
    yield "own: 6 of 20, 3.4 × the median's length", lambda h, a, v: [
        each(h, "honest"), each(a.uploads(6, {n: np.float32(2) * p for n, p in v.items()}), "evil")
    ], True  # fmt: skip
    yield "own: 50 by one token, as like the others as honest ones", lambda h, a, v: [
        each(h, "honest"), one(a.uploads(50, a.craft(0.75)), "evil")
    ], True  # fmt: skip
    yield "own: moments mirrored, 3 × as far, 6 tokens of 20", lambda h, a, v: [
        each(h, "honest"), each([a.far_moments(h[i], 3.0, f"evil-{i}") for i in range(6)], "evil")
    ], True  # fmt: skip
    if moment_pairs(BASE):
        for n in (6, 13):
            yield f"own: moments crafted, 3.5 × as far, {n} tokens of {14 + n}", lambda h, a, v, n=n: [
                each(h, "honest"), each(a.craft_moments(n), "evil")
            ], True  # fmt: skip
    yield "adaptive: 13 of 27, as much as the probes let pass", lambda h, a, v: [
        each(h, "honest"), each(a.let_pass(13, a.craft(0.75)), "evil")
    ], True  # fmt: skip
    yield "adaptive: 13 of 27, made to be kind to the probes", lambda h, a, v: [
        each(h, "honest"), each(a.let_pass(13, a.kind(13)[0]), "evil")
    ], True  # fmt: skip
    yield "adaptive: 13 of 27, harmless one by one", lambda h, a, v: [
        each(h, "honest"), each(a.one_by_one(13), "evil")
    ], True  # fmt: skip
    yield "adaptive: 20 of 34, made to be kind to the probes", lambda h, a, v: [
        each(h, "honest"), each(a.let_pass(20, a.kind(20)[0]), "evil")
    ], True  # fmt: skip
    yield "a small clean pool: 4 tokens", lambda h, a, v: [each(h[::4], "honest")], True
    yield "own: 12 crafted by a fifth token", lambda h, a, v: [
        each(h[::4], "honest"), one(a.uploads(12, v), "evil")
    ], True  # fmt: skip


def hub(rounds: Sequence[Sequence[Upload]], is_open: bool) -> tuple[Bundle | None, dict[str, int], dict[str, int]]:
    """The bundle of a hub that was sent these, if it has any, and the states of honest and of evil experts."""
    with tempfile.TemporaryDirectory() as folder:
        settings = HubSettings.in_folder(Path(folder), open=is_open, probe=not OPTIONS.no_probes)
        store = Store(settings.database, settings.blobs)
        store.put_family(FamilyFile.of_runtime(RUNTIME).to_bytes(), RUNTIME.family)
        if not OPTIONS.no_probes:
            store.put_probes(RUNTIME.family, probe_file().to_bytes())
        builder = Builder(store, settings)
        tokens: dict[str, str] = {}
        for uploads in rounds:
            for name, expert in uploads:
                if name not in tokens:
                    approved = not name.startswith("?")
                    tokens[name] = store.create_token(name, "contribute", approved=approved)[1].id
                store.add_expert(RUNTIME.family, expert.to_bytes(), tokens[name])
            builder.build_all()
        current = store.current(RUNTIME.family, Variant())
        bundle = None if current is None else Bundle.from_bytes(store.blob(current.id))
        honest = {token for name, token in tokens.items() if name.startswith("honest")}
        states: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for entry in store.experts(RUNTIME.family):
            of = states[entry.token not in honest]
            of[entry.state] = of.get(entry.state, 0) + 1
        store.close()
    return bundle, *states


def errors(bundle: Bundle | None, target: str) -> tuple[float, float]:
    """Of the merge and of the device, which does not start without a bundle."""
    if bundle is None:
        return np.nan, np.nan
    domain, merged = target_of(SUITE, target), bundle.merge()
    wrong = [np.argmax(RUNTIME(x, merged).logits, 1) != y for x, y in domain.stream(0, 200)]
    online = []
    for order in range(OPTIONS.orders):
        adapter = RaceMerge(RUNTIME, bundle, source=SOURCE)
        online += [np.argmax(adapter.predict(x), 1) != y for x, y in domain.stream(order, 64)]
    return 100 * float(np.concatenate(wrong).mean()), 100 * float(np.concatenate(online).mean())


def false_base(honest: Sequence[Expert]) -> str:
    """A row of the table: clients compare the registered base with their own before they upload anything, and a device
    refuses a bundle of another base. (That only administrators register is `tests/test_hub_trust.py`.)
    """
    rng = np.random.default_rng(0)
    wrong = {n: v + 0.5 * np.abs(v).mean() * rng.normal(size=v.size).astype(np.float32) for n, v in BASE.items()}
    wrong |= {n: np.abs(v) for n, v in wrong.items() if n.endswith("running_var")}
    for refused in (
        lambda: FamilyFile(RUNTIME.family, wrong).check_base(BASE),
        lambda: RaceMerge(RUNTIME, build_bundle(wrong, honest)),
    ):
        try:
            refused()
        except MergettaError:
            continue
        raise AssertionError("a false base was taken")
    return f"| false base | 0 / {len(honest)} | refused by clients and by devices | – | – |"


def main() -> None:
    results = Results(Path(default_cache()))
    experts = {domain: make_expert(SUITE, "roid", domain, 0, results) for domain in SUITE.domains}
    plain = [
        100 * float(np.mean(np.concatenate([
            np.argmax(RUNTIME(x, given=1.0).logits, 1) != y for x, y in target_of(SUITE, target).stream(0, 200)
        ])))
        for target in TARGETS
    ]  # fmt: skip
    print(f"source model: {np.mean(plain):.1f}", flush=True)
    pools = {target: [e for domain, e in experts.items() if domain != target] for target in TARGETS}
    images = [next(iter(training_of(SUITE, target).stream(9, 300))) for target in TARGETS]
    attackers = {target: Attacker(RUNTIME, pool, images, probe_file) for target, pool in pools.items()}
    crafted = {target: attacker.craft() for target, attacker in attackers.items()}
    print("| attack | honest active / out | evil active / quarantined / waiting | merge | device |")
    print("|---|---|---|---:|---:|")
    print(false_base(pools[TARGETS[0]]))
    for name, attack, is_open in attacks():
        if not re.search(OPTIONS.wanted, name):
            continue
        found = []
        for target in TARGETS:
            bundle, good, bad = hub(attack(pools[target], attackers[target], crafted[target]), is_open)
            found.append(errors(bundle, target))
        merge, device = np.mean(found, axis=0)
        out = sum(number for state, number in good.items() if state != ACTIVE)
        evil = " / ".join(str(bad.get(state, 0)) for state in (ACTIVE, QUARANTINED, PENDING))
        print(f"| {name} | {good.get(ACTIVE, 0)} / {out} | {evil} | {merge:.1f} | {device:.1f} |", flush=True)


if __name__ == "__main__":
    main()
