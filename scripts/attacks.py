"""What bad contributors can do to a hub and to its devices, end to end in one process: store, builder, bundle, device.

python scripts/attacks.py                      # fashion-bn, severity 5, mean of three domains; 10 minutes
python scripts/attacks.py --suite fashion-vit  # another family
python scripts/attacks.py '^(?!adaptive)'      # rows whose name this pattern is found in
python scripts/attacks.py --probes             # the hub tries experts on clean images (`mergetta hub probe`)

Honest experts are those of the 14 other domains, one contributor each unless told. Crafted ones raise the error on
other images of the targets as far as the screening lets them: norm and direction of honest experts, as a whole and in
each layer. `merge` is the error of the bundle's start with the statistics of batches of 200, as in the paper; `device`
that of race-merge with its default settings, in batches of 64, over four orders of the images. The corruptions of the
three targets are not among the views of the probes. Adaptive attackers know the probes, as if they had the file.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mergetta import Bundle, Expert, MergettaError, RaceMerge, TorchRuntime, build_bundle
from mergetta.bench.inputs import clean_images, family_of, place_of, target_of, training_of
from mergetta.bench.pools import make_expert
from mergetta.bench.protocol import device_model, measured
from mergetta.bench.store import Store as Results
from mergetta.bench.store import default_cache
from mergetta.bench.suite import load_suite
from mergetta.data.corruptions import CORRUPTIONS
from mergetta.family_file import FamilyFile
from mergetta.groups import learnable, moment_pairs
from mergetta.hub.builder import Builder
from mergetta.hub.probes import COUNT, FAR, RUIN, ProbeFile, Probes, most_harm
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, Variant
from mergetta.hub.screening import TINY
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.runtimes.torch_runtime import shares_of

PARSER = argparse.ArgumentParser()
PARSER.add_argument("wanted", nargs="?", default="", help="rows whose name this pattern is found in")
PARSER.add_argument("--suite", default="fashion-bn")
PARSER.add_argument("--severity", type=int, default=5)
PARSER.add_argument("--targets", nargs="+", default=["fog", "gaussian_noise", "pixelate"])
PARSER.add_argument("--probes", action="store_true", help="try experts on 32 clean images in 13 views")
PARSER.add_argument("--orders", type=int, default=4, help="of the images, for the device")
OPTIONS = PARSER.parse_args(None if __name__ == "__main__" else [])  # tests import it
TARGETS = tuple(OPTIONS.targets)
SUITE = load_suite(OPTIONS.suite).restricted(samples=1000, severity=OPTIONS.severity)
SUITE = SUITE.model_copy(update={"expert_samples": 3000})
RUNTIME = TorchRuntime(family_of(SUITE))
SOURCE = measured("features", place_of(SUITE), 64, None)
"""What features look like on clean images: an exported model has it, for families without BatchNorm."""
BASE, NAMES = RUNTIME.groups, learnable(RUNTIME.groups)
VIEWS = [name for name in CORRUPTIONS if name not in TARGETS]
Upload = tuple[str, Expert]
"""A token, and what it uploads."""


def task(expert: Expert) -> dict[str, np.ndarray]:
    return {name: expert.groups[name] - BASE[name] for name in NAMES}


def with_task(expert: Expert, vector: dict[str, np.ndarray], domain: str) -> Expert:
    groups = {**expert.groups, **{name: BASE[name] + vector[name] for name in NAMES}}
    return replace(expert, groups=groups, domain=domain)


def length_of(vector: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(part @ part) for part in vector.values())))


def scaled(expert: Expert, factor: float, domain: str) -> Expert:
    return with_task(expert, {name: factor * part for name, part in task(expert).items()}, domain)


def probe_file() -> ProbeFile:
    """Of clean images that no target and no expert has seen."""
    found = clean_images(place_of(SUITE), COUNT)
    assert found is not None
    return ProbeFile.of_images(device_model(place_of(SUITE), False), np.asarray(found.images), VIEWS)


class Attacker:
    """Knows all honest experts, the screening, and labelled images like those of the targets.

    Its vectors are as long as the longest honest ones, 1.7 times the median.
    """

    def __init__(self, honest: Sequence[Expert], longer: float = 1.7) -> None:
        self.honest = list(honest)
        tasks = [task(expert) for expert in honest]
        self.mean = {name: np.mean([each[name] for each in tasks], axis=0) for name in NAMES}
        self.longest = {name: longer * np.median([np.linalg.norm(each[name]) for each in tasks]) for name in NAMES}
        self.images = [next(iter(training_of(SUITE, domain).stream(9, 300))) for domain in TARGETS]

    def allowed(self, vector: dict[str, np.ndarray], cosine: float) -> dict[str, np.ndarray]:
        """The nearest that has an honest length in each layer, and this cosine with the honest mean."""
        found = {}
        for name, part in vector.items():
            along = self.mean[name] / np.linalg.norm(self.mean[name])
            across = part - (part @ along) * along
            across *= (1 - cosine**2) ** 0.5 / max(float(np.linalg.norm(across)), 1e-12)
            found[name] = (self.longest[name] * (cosine * along + across)).astype(np.float32)
        return found

    def craft(self, cosine: float = 0.2, steps: int = 40) -> dict[str, np.ndarray]:
        """With 0.2, as far as the screening lets through; honest experts have about 0.75."""
        vector = self.allowed({name: np.random.default_rng(0).normal(size=BASE[name].size) for name in NAMES}, cosine)
        for step in range(steps):
            images, labels = self.images[step % len(self.images)]
            tensors = {name: torch.from_numpy(part).requires_grad_() for name, part in vector.items()}
            moved = {name: torch.from_numpy(BASE[name]) + 1.4 * tensor for name, tensor in tensors.items()}
            logits = RUNTIME.forward(images, moved).logits
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
            steps_of = {n: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for n, t in tensors.items()}
            vector = self.allowed({n: vector[n] + self.longest[n] * steps_of[n] for n in NAMES}, cosine)
        return vector

    def craft_moments(self, count: int, cosine: float = 0.0, steps: int = 40) -> list[Expert]:
        """Honest weights; moments 3.5 times as far off as the median ones in each layer, made to do most harm to the
        targets, with a cosine with the honest mean that the screening lets pass.
        """
        pairs, images = moment_pairs(BASE), self.images
        rooted = {m: np.sqrt(BASE[v] + TINY) for m, v in pairs}
        ways = [
            {m: np.stack([(e.groups[m] - BASE[m]) / rooted[m], np.log((e.groups[v] + TINY) / (BASE[v] + TINY))])
             for m, v in pairs}
            for e in self.honest
        ]  # fmt: skip
        mean = {m: np.mean([way[m] for way in ways], axis=0) for m, _ in pairs}
        far = {m: 3.5 * np.median([np.linalg.norm(way[m]) for way in ways]) for m, _ in pairs}
        usual = {n: torch.from_numpy(BASE[n] + self.mean[n]) for n in NAMES}
        given = shares_of(1.0, sum(mean[m].shape[1] for m in mean))

        def allowed(way: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            found = {}
            for m, part in way.items():
                along = mean[m] / np.linalg.norm(mean[m])
                across = part - (part * along).sum() * along
                across *= (1 - cosine**2) ** 0.5 / max(float(np.linalg.norm(across)), 1e-12)
                found[m] = (far[m] * (cosine * along + across)).astype(np.float32)
            return found

        found = allowed({m: np.random.default_rng(0).normal(size=part.shape) for m, part in mean.items()})
        for step in range(steps):  # a scale and a shift can do what given moments do, and have gradients
            tensors, moved = {m: torch.from_numpy(part).requires_grad_() for m, part in found.items()}, dict(usual)
            for m, tensor in tensors.items():
                scale, shift = (m.replace("running_mean", part) for part in ("weight", "bias"))
                moved[scale] = usual[scale] * (-tensor[1] / 2).exp()
                moved[shift] = usual[shift] - tensor[0] * moved[scale]
            x, y = images[step % len(images)]
            logits = RUNTIME._run(RUNTIME._prepare(x), {**RUNTIME._source, **moved}, given, False).logits
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
            steps_of = {m: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for m, t in tensors.items()}
            share = 1 - step / steps
            found = allowed({m: part + share * far[m] * steps_of[m] for m, part in found.items()})
        crafted = {}
        for m, v in pairs:
            crafted[m] = BASE[m] + found[m][0] * rooted[m]
            crafted[v] = (BASE[v] + TINY) * np.exp(found[m][1]) - TINY
        return [
            replace(e, groups={**e.groups, **{n: np.float32(part * (1 + i / 1000)) for n, part in crafted.items()}},
                    domain=f"evil-{i}")
            for i, e in enumerate((self.honest * 2)[:count])
        ]  # fmt: skip

    def told_apart(self, count: int, cosine: float = 0.75) -> list[Expert]:
        """As like the honest mean as honest ones; half of the rest is crafted, half is an honest expert's own, so that
        they are hardly more like one another than others are.
        """
        crafted, found = self.craft(cosine), []
        for i in range(count):
            honest, mixed = task(self.honest[i % len(self.honest)]), {}
            for name, part in crafted.items():
                along = self.mean[name] / np.linalg.norm(self.mean[name])
                aside, own = (vector - (vector @ along) * along for vector in (part, honest[name]))
                own = own - (own @ aside) / max(float(aside @ aside), 1e-12) * aside
                lengths = [max(float(np.linalg.norm(vector)), 1e-12) for vector in (aside, own)]
                mixed[name] = aside / lengths[0] + own / lengths[1]
            found.append(with_task(self.honest[i % len(self.honest)], self.allowed(mixed, cosine), f"evil-{i}"))
        return found

    def tries(self, count: int) -> None:
        """What it needs to know of the probes, to have so many experts pass. They will be as long as the usual ones."""
        if not hasattr(self, "probes"):
            self.probes = Probes(probe_file(), runtime=RUNTIME)
            usual = np.median([length_of(task(expert)) for expert in self.honest])
            self.usual = float(1.1 ** np.round(np.log(usual) / np.log(1.1)))  # as the hub rounds it
            self.harms = [self.probes.harm(expert.groups, self.usual) for expert in self.honest]
        self.goal = most_harm([*self.harms, *[np.log(RUIN)] * count])[0] - 0.02  # so as to count fully

    def passing(self, expert: Expert, vector: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The largest share of a vector, the rest an honest expert's own, that the probes let pass."""
        low, high, own = 0.0, 1.0, task(expert)
        for _ in range(7):
            share = (low + high) / 2
            mixed = {n: (1 - share) * own[n] + share * vector[n] for n in NAMES}
            harm = self.probes.harm(with_task(expert, mixed, "").groups, self.usual)
            low, high = (share, high) if harm < self.goal else (low, share)
        mixed = {n: (1 - low) * own[n] + low * vector[n] for n in NAMES}
        return {n: np.float32(self.usual / length_of(mixed)) * part for n, part in mixed.items()}

    def let_pass(self, count: int, vector: dict[str, np.ndarray]) -> list[Expert]:
        """As much of a vector in each as the probes let pass."""
        self.tries(count)
        chosen = [self.honest[i % len(self.honest)] for i in range(count)]
        return [with_task(e, self.passing(e, vector), f"evil-{i}") for i, e in enumerate(chosen)]

    def kind(self, count: int, parts: int = 1, steps: int = 80) -> list[dict[str, np.ndarray]]:
        """Vectors that are each harmless on the probes, far along, and whose mean does most harm to the targets when it
        is half of the merge.
        """
        self.tries(count)
        rng, mean = np.random.default_rng(0), {n: torch.from_numpy(part) for n, part in self.mean.items()}
        found = [self.allowed({n: rng.normal(size=BASE[n].size) for n in NAMES}, 0.75) for _ in range(parts)]
        base = {n: torch.from_numpy(BASE[n]) for n in NAMES}
        for step in range(steps):
            images, labels = self.images[step % len(self.images)]
            tensors = [{n: torch.from_numpy(part).requires_grad_() for n, part in each.items()} for each in found]
            middle = {n: sum(each[n] for each in tensors) / parts for n in NAMES}
            logits = RUNTIME.forward(images, {n: base[n] + 0.7 * (mean[n] + middle[n]) for n in NAMES}).logits
            gain = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
            gain = gain - 3 * sum(self.suspicion(each, base, step) for each in tensors)
            gain.backward()
            for i, each in enumerate(tensors):
                steps_of = {n: t.grad.numpy() / max(float(t.grad.norm()), 1e-12) for n, t in each.items()}
                share = 1 - step / steps
                found[i] = self.allowed({n: found[i][n] + share * self.longest[n] * steps_of[n] for n in NAMES}, 0.75)
        return found

    def suspicion(self, vector: dict[str, torch.Tensor], base: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        """How far a vector is above its goal on three of the views."""
        length = torch.sqrt(sum((part**2).sum() for part in vector.values()))
        moved = {n: base[n] + FAR * self.usual / length * part for n, part in vector.items()}
        expected, losses = torch.from_numpy(self.probes.expected), []
        for i in range(3):
            view = self.probes.views[(3 * step + i) % len(self.probes.views)]
            logits = RUNTIME.forward(view, moved).logits.double()
            losses.append(-(expected * torch.log_softmax(logits, 1)).sum(1).mean())
        return torch.relu(torch.log(sum(losses) / 3 / self.probes.own) - self.goal + 0.1)

    def one_by_one(self, count: int) -> list[Expert]:
        """Two kinds in turn, each harmless on the probes: together they are not."""
        first, second = (self.let_pass(count, vector) for vector in self.kind(count, 2))
        return [(first, second)[i % 2][i] for i in range(count)]

    def uploads(self, count: int, vector: dict[str, np.ndarray]) -> list[Expert]:
        """All different, with the moments of honest experts."""
        rng = np.random.default_rng(1)
        return [
            with_task(
                self.honest[i % len(self.honest)],
                {n: part + 0.02 * self.longest[n] * rng.normal(size=part.size) / part.size**0.5
                 for n, part in vector.items()},
                f"evil-{i}",
            )
            for i in range(count)
        ]  # fmt: skip


def each(experts: Sequence[Expert], name: str) -> list[Upload]:
    """One contributor per expert."""
    return [(f"{name}-{i}", expert) for i, expert in enumerate(experts)]


def one(experts: Sequence[Expert], name: str) -> list[Upload]:
    return [(name, expert) for expert in experts]


def drift(attacker: Attacker, vector: dict[str, np.ndarray]) -> list[list[Upload]]:
    """Three tokens, 80 uploads each: step by step from honest to three times as long as crafted; a build after 15."""
    found = []
    for i in range(80):
        share = (i + 1) / 80
        for token in range(3):
            start = task(attacker.honest[token])
            moved = {n: (1 - share) * start[n] + 3 * share * vector[n] for n in NAMES}
            found.append((f"drift-{token}", with_task(attacker.honest[token], moved, f"drift-{token}-{i}")))
    return [found[i : i + 15] for i in range(0, len(found), 15)]


def far_moments(expert: Expert, share: float, domain: str) -> Expert:
    """Honest weights; moments on the other side of the source's, `share` times as far away as honest ones."""
    groups = dict(expert.groups)
    for name in groups:
        if name.endswith("running_mean"):
            groups[name] = BASE[name] - share * (groups[name] - BASE[name])
        elif name.endswith("running_var"):
            groups[name] = BASE[name] * (BASE[name] / np.maximum(groups[name], 1e-6)) ** share
    return replace(expert, groups=groups, domain=domain)


Attack = Callable[[list[Expert], Attacker, dict[str, np.ndarray]], list[list[Upload]]]
"""Honest experts, an attacker and its vector → rounds of uploads, with a build after each."""


def attacks() -> Iterator[tuple[str, Attack, bool]]:
    """(name, uploads, whether the hub is open)."""
    yield "clean pool", lambda h, a, v: [each(h, "honest")], True
    for n in (15, 50):
        yield f"{n} crafted by one token", lambda h, a, v, n=n: [each(h, "honest"), one(a.uploads(n, v), "evil")], True
    yield "two tokens in all, 15 of −20 ×", lambda h, a, v: [
        one(h, "honest") + one([scaled(h[i % len(h)], -20, f"evil-{i}") for i in range(15)], "evil")
    ], True  # fmt: skip
    yield "4 crafted first, by one token, alone", lambda h, a, v: [one(a.uploads(4, v), "evil")], True
    yield "… after 14 honest ones", lambda h, a, v: [one(a.uploads(4, v), "evil"), each(h, "honest")], True
    yield "… the hub not open", lambda h, a, v: [one(a.uploads(4, v), "?evil"), each(h, "honest")], False
    yield "31 negated by one token first", lambda h, a, v: [
        one([scaled(h[i % len(h)], -1 - i / 100, f"evil-{i}") for i in range(31)], "evil"), each(h, "honest")
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
        each(h, "honest"), each([far_moments(h[i], 3.0, f"evil-{i}") for i in range(6)], "evil")
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
        settings = HubSettings.in_folder(Path(folder), open=is_open)
        store = Store(settings.database, settings.blobs)
        store.put_family(FamilyFile.of_runtime(RUNTIME).to_bytes(), RUNTIME.family)
        if OPTIONS.probes:
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
    attackers = {target: Attacker(pool) for target, pool in pools.items()}
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
