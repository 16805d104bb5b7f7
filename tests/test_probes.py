"""Behavioural screening: experts are tried on images that the operator vouches for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mergetta import Expert, MergettaError
from mergetta.family_file import FamilyFile
from mergetta.groups import check_groups
from mergetta.hub import newcomers
from mergetta.hub import probes as module
from mergetta.hub.influence import LEAST, usual_length
from mergetta.hub.newcomers import judge_newcomers, weights_of
from mergetta.hub.probes import (
    ALONE,
    DOUBT,
    DOUBTFUL,
    ORDINARY,
    RUIN,
    WORSE,
    ProbeFile,
    Probes,
    different,
    doubts,
    harmful,
)
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, ExpertRecord
from mergetta.hub.store import Store, upkeep
from mergetta.hub.store.schema import experts
from mergetta.hub.store.storage import Unavailable
from mergetta.runtimes.base import Classifier, Output

from .fleet import BUNDLE, Fleet
from .hub_parts import BASE, FAMILY, SHARED, SIZES, expert_of, family_file, honest, task_vector
from .test_cli import mergetta
from .test_hub_builder import Workshop

IMAGES = np.random.default_rng(3).integers(0, 256, (24, 4, 4, 1), dtype=np.uint8)
FILE = ProbeFile(b"a model", {"clean": IMAGES, "dark": IMAGES // 2})
HONEST = np.linalg.qr(np.stack([SHARED, *(task_vector(seed) for seed in range(8))], axis=1))[0]
ASIDE = np.random.default_rng(5).normal(size=SHARED.size)
ASIDE -= HONEST @ (HONEST.T @ ASIDE)
ASIDE *= np.linalg.norm(SHARED) / np.linalg.norm(ASIDE)
"""As long as what honest experts share, and nothing of theirs: predictions turn over along it."""
SHARP = 30


class Tiny:
    """Four classes that are told apart well unless the task vector goes further along `ASIDE` than honest ones do."""

    family, signature, structure, classes, forwarded = FAMILY, None, (), 4, 0
    groups, classifier = BASE, Classifier(np.eye(4, dtype=np.float32), np.zeros(4, np.float32))

    def __call__(self, images, groups=None, given=0.0, moments=False):
        Tiny.forwarded += 1
        groups = self.groups if groups is None else groups
        check_groups(groups, self.groups, "The set of groups")
        task = np.concatenate([groups[name] - BASE[name] for name in SIZES])
        turned = 1 - 30 * max(0.0, float(task @ ASIDE) / float(ASIDE @ ASIDE) - 0.15)
        if given and np.any(groups["stem.running_var"] > 10 * BASE["stem.running_var"]):
            turned = -1.0
        logits = turned * SHARP * np.asarray(images)[:, 0, 0] - np.float32(2)
        return Output(logits, logits, np.zeros((2, 1), np.float32))

    def folded(self, groups):
        raise NotImplementedError


def crafted(seed: int) -> Expert:
    """As like the honest ones as they are to one another; most of what is its own ruins predictions."""
    return expert_of(0.1 * (SHARED + 0.8 * ASIDE + 0.6 * np.random.default_rng(seed).normal(size=SHARED.size)))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setattr(module, "opened", lambda model: Tiny())
    shop = Workshop(tmp_path / "hub", open=True)
    for seed in range(6):
        shop.upload(honest(seed), f"honest-{seed}")
    return shop


def entry(token: str, harm: float | None, number: int = 0) -> ExpertRecord:
    facts = ("fog", "roid", None, 1, 1.0, b"", b"", ACTIVE, "", False)
    return ExpertRecord(f"{token}-{number}", FAMILY, *facts, token, 0.0, 0.0, 0, "p", 1.0, harm)


class TestHarm:
    def test_by_hand(self) -> None:
        """The loss is that of the source model's predictions on clean images; along `ASIDE` they are turned over."""
        probes = Probes(FILE, runtime=Tiny())
        clean, dark = (SHARP * view[:, 0, :, 0].astype(np.float64) / 255 for view in (IMAGES, IMAGES // 2))
        logs = [z - np.log(np.exp(z).sum(axis=1, keepdims=True)) for z in (clean, dark, -2 * clean, -2 * dark)]
        losses = [-(np.exp(logs[0]) * each).sum(axis=1).mean() for each in logs]
        assert probes.own == pytest.approx(np.mean(losses[:2]), rel=1e-4)
        assert probes.loss(expert_of(0.25 * ASIDE).groups) == pytest.approx(np.mean(losses[2:]), rel=1e-4)

    def test_the_length_of_an_expert_does_not_matter(self) -> None:
        probes = Probes(FILE, runtime=Tiny())
        vector = SHARED + ASIDE
        short, long = (probes.harm(expert_of(size * vector).groups, 0.7) for size in (0.02, 0.2))
        assert short == pytest.approx(long, abs=1e-3) and short > 0.1
        assert probes.harm(BASE, 1.0) == 0.0

    def test_no_numbers_are_harm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        probes = Probes(FILE, runtime=Tiny())
        monkeypatch.setattr(probes, "losses", lambda groups, given, _: np.full(2, 1.0 if given else math.nan))
        assert probes.harm(honest(0).groups, 1.0) == module.WORST

    def test_moments_that_ruin_predictions_are_harm(self) -> None:
        """They do nothing as long as batches bring their own statistics."""
        probes, good = Probes(FILE, runtime=Tiny()), honest(0)
        variance = 20 * BASE["stem.running_var"]
        evil = replace(good, groups={**good.groups, "stem.running_var": variance})
        assert not probes.misleads(good.groups) and probes.misleads(evil.groups)
        assert probes.loss(evil.groups) == probes.loss(good.groups)
        assert probes.harm(evil.groups, 1.0) == module.WORST
        assert "far worse than guesses" in harmful([], [entry("e", module.WORST)])["e-0"]

    def test_who_is_harmful(self) -> None:
        low, far = math.log(1.5), WORSE * math.log(1.5)
        good = [entry(f"t{i}", low) for i in range(6)]
        assert harmful(good, [*good, entry("just", far - 0.01), entry("more", far + 0.01)]).keys() == {"more-0"}
        worst = [entry(f"e{i}", math.log(RUIN) + 0.1) for i in range(3)]
        assert harmful(worst, worst).keys() == {each.id for each in worst}  # where there is nothing else, too
        two = [entry("a", low), entry("b", far + 0.1)]
        assert harmful(two, two) == {} == harmful(two, [entry("unknown", None)])
        assert harmful(two, [entry("b", math.log(ALONE) + 0.01)])
        best = [entry(f"t{i}", -0.1 * i) for i in range(6)]
        assert harmful(best, [*best, entry("better", math.log(DOUBT) - 0.01)]) == {}

    def test_who_is_doubtful_counts_less(self) -> None:
        """Nobody does up to twice what an ordinary contributor does; a quarter of a nat above that, a sixteenth."""
        ordinary = math.log(1.5)
        good = [entry(f"t{i}", ordinary) for i in range(6)]
        more = [entry(f"x{i}", DOUBTFUL * ordinary + above) for i, above in enumerate((-0.01, 0.05, 0.1, 0.3))]
        assert doubts(good, [*good, *more]) == {"x1": 0.5, "x2": 0.25, "x3": LEAST}

    def test_less_than_three_quarters_cannot_move_the_limit(self) -> None:
        """Nor does one contributor by sending more."""
        bad = [entry(f"e{i}", WORSE * math.log(1.5) + 0.1) for i in range(20)]
        good = [entry(f"t{i}", math.log(1.5)) for i in range(14)]
        assert len(bad) < (ORDINARY - 1) * len(good)
        assert harmful([*good, *bad], [*good, *bad]).keys() == {each.id for each in bad}
        many = [entry("e", WORSE * math.log(1.5) + 0.1, number) for number in range(50)]
        assert len(harmful([*good[:4], *many], [*good, *many])) == 50


class TestHub:
    def test_what_looks_honest_and_ruins_predictions(self, shop: Workshop) -> None:
        evil = [shop.upload(crafted(seed), f"evil-{seed}") for seed in range(5)]
        shop.build()
        before = {e.id: e.state for e in shop.store.experts(FAMILY)}
        assert set(before.values()) == {ACTIVE}  # nothing that the hub sees tells them from honest ones
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        found = {e.id: e for e in shop.store.experts(FAMILY)}
        assert {name for name, e in found.items() if e.state == QUARANTINED} == set(evil)
        assert all("probe images" in found[name].reason for name in evil)
        assert shop.bundle().settings["experts"] == 6
        shop.store.put_probes(FAMILY, None)
        shop.build()
        assert {e.state for e in shop.store.experts(FAMILY)} == {ACTIVE}
        actions = [entry.action for entry in shop.store.audit()]
        assert "set probes" in actions and "remove probes" in actions

    def test_an_honest_pool_is_merged_as_without(self, shop: Workshop) -> None:
        shop.build()
        before = shop.bundle()
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        assert {e.state for e in shop.store.experts(FAMILY)} == {ACTIVE}
        for name, vector in before.merge().items():
            np.testing.assert_array_equal(shop.bundle().merge()[name], vector)

    def test_weights_follow_the_probes(self, shop: Workshop) -> None:
        """As long as there are some: what is remembered of others does not count."""
        voices = [entry(f"t{i}", math.log(1.5)) for i in range(6)]
        voices.append(entry("x", 2.9 * math.log(1.5)))
        assert weights_of(voices, 0.0, "p") == {"x": LEAST}
        assert weights_of(voices, 0.0, "other") == {} == weights_of(voices, 0.0, "")

    def test_each_is_tried_once(self, shop: Workshop) -> None:
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        before = Tiny.forwarded
        shop.upload(honest(7), "honest-7")
        shop.build()
        assert Tiny.forwarded - before == 2 * len(FILE.views)  # with statistics of batches, and with its moments
        shop.store.put_probes(FAMILY, replace(FILE, model=b"another").to_bytes())
        shop.build()
        assert Tiny.forwarded - before > 7 * len(FILE.views)

    def test_what_a_person_has_accepted_stays(self, shop: Workshop) -> None:
        evil = shop.upload(crafted(0), "evil")
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        assert shop.store.expert(evil).state == QUARANTINED
        shop.store.decide(evil, ACTIVE, "we know it")
        shop.build()
        assert shop.store.expert(evil).state == ACTIVE

    def test_what_a_person_has_accepted_is_the_yardstick(self, shop: Workshop) -> None:
        """So a majority cannot make the usual length so short that nothing is seen."""
        evil = [shop.upload(crafted(seed), f"evil-{seed}") for seed in range(4)]
        short = [shop.upload(expert_of(0.3 * task_vector(seed)), f"short-{seed}") for seed in range(20, 32)]
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        assert {shop.store.expert(each).state for each in evil} == {ACTIVE}
        for expert in shop.store.experts(FAMILY):
            if expert.token.startswith("honest"):
                shop.store.decide(expert.id, ACTIVE, "ours")
        shop.build()
        assert {shop.store.expert(each).state for each in evil} == {QUARANTINED}
        assert {shop.store.expert(each).state for each in short} == {ACTIVE}

    def test_who_is_harmful_has_no_voice(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: list[set[str]] = []
        monkeypatch.setattr(
            "mergetta.hub.newcomers.screen",
            lambda voices, suspects, groups: heard.append({e.id for e in voices}) or {},
        )
        evil = shop.upload(crafted(0), "evil")
        file = family_file()
        judge_newcomers(shop.store, shop.settings, shop.store.family(FAMILY), file, Probes(FILE, runtime=Tiny()))
        judge_newcomers(shop.store, shop.settings, shop.store.family(FAMILY), file)
        assert evil not in heard[0] and evil in heard[1]

    def test_a_lost_expert_stops_nobody(self, shop: Workshop) -> None:
        lost = shop.store.experts(FAMILY)[0].id
        shop.lose(lost, "missing")
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        assert shop.bundle().settings["experts"] == 5

    def test_who_cannot_be_tried_waits(self, shop: Workshop) -> None:
        """Until the very same is sent again."""
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        evil = crafted(0)
        lost = shop.upload(evil, "evil")
        shop.lose(lost, "missing")
        shop.build()
        assert shop.store.expert(lost).state == PENDING
        shop.upload(evil, "evil")
        shop.build()
        assert shop.store.expert(lost).state == QUARANTINED

    def test_nobody_in_a_large_pool_is_merged_untried(
        self, shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(newcomers, "RESCREEN", 10)
        waiting = Workshop(tmp_path / "waiting", probe=True)
        for seed in range(12):
            waiting.upload(crafted(seed), f"evil-{seed % 3}")
        waiting.build()
        waiting.store.put_probes(FAMILY, FILE.to_bytes())
        waiting.build()
        assert all(e.harm is not None for e in waiting.store.experts(FAMILY))
        assert waiting.store.counts(FAMILY)[QUARANTINED] > 0

    def test_experts_of_no_length_do_not_say_what_is_usual(self, shop: Workshop) -> None:
        """They are refused; ones that are there from before do not switch off what is measured in usual lengths."""
        with pytest.raises(MergettaError, match="has learnt nothing"):
            shop.upload(expert_of(0 * ASIDE), "evil")
        with shop.store.database.write() as connection:
            connection.execute(experts.update().values(norm=0.0))
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        evil = shop.upload(crafted(0), "evil")
        shop.build()
        assert shop.store.expert(evil).state == QUARANTINED
        assert usual_length([replace(shop.store.expert(evil), norm=norm) for norm in (0.0, 0.0, 1.0)]) == 1.0

    def test_who_takes_long_lets_others_go_on(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        """One is tried at a time here, of each contributor one first; nobody is judged by half a yardstick."""
        for seed in range(6, 9):
            shop.upload(honest(seed), "honest-0")
        monkeypatch.setattr(newcomers, "AT_A_TIME", 0.0)
        monkeypatch.setattr(newcomers, "YARDSTICK", 6)
        lost = shop.upload(honest(20), "gone")
        shop.lose(lost, "missing")
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        merged, tried = [], [0]
        while tried[-1] < 9:
            shop.build()
            tried.append(sum(e.harm is not None for e in shop.store.experts(FAMILY)))
            assert tried[-2] < tried[-1] <= tried[-2] + 2  # one of the yardstick, or one of the others
            merged.append(shop.store.counts(FAMILY).get(ACTIVE, 0))
        assert merged[:4] == [0] * 4 and merged[-1] == 9
        shop.build()
        family = shop.store.family(FAMILY)
        shop.build()
        assert family.built == shop.store.family(FAMILY).built == family.generation
        assert shop.store.expert(lost).state == PENDING

    def test_strangers_do_not_take_turns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "opened", lambda model: Tiny())
        shop = Workshop(tmp_path / "closed", probe=True)
        stranger = shop.store.create_token("stranger", "contribute")[1].id
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        theirs, ours = shop.upload(honest(1), stranger), shop.upload(honest(0))
        shop.build()
        assert shop.store.expert(theirs).harm is None and shop.store.expert(ours).state == ACTIVE

    def test_a_hub_that_stops_does_not_finish_a_trial(self, shop: Workshop) -> None:
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.builder.stop()
        with pytest.raises(Unavailable, match="stops"):
            shop.build()
        assert shop.store.counts(FAMILY) == {PENDING: 6}

    @pytest.mark.parametrize("options", [{"open": True}, {"screen": False}, {"probe": False}])
    def test_who_waited_is_merged_by_a_hub_that_asks_for_nothing(
        self, tmp_path: Path, options: dict[str, bool]
    ) -> None:
        before = Workshop(tmp_path, probe=True)
        before.upload(honest(0))
        before.build()
        after = Workshop(tmp_path, **{"probe": True, **options})
        after.build()
        assert after.store.counts(FAMILY) == {ACTIVE: 1} and after.bundle().settings["experts"] == 1
        generation = after.store.family(FAMILY).generation
        Workshop(tmp_path, **{"probe": True, **options}).build()
        assert after.store.family(FAMILY).generation == generation

    def test_lost_probes_let_nobody_in(self, shop: Workshop) -> None:
        """And `hub check` says what to do."""
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.lose(shop.store.family(FAMILY).probes, "damaged")
        shop.build()
        assert {e.state for e in shop.store.experts(FAMILY)} == {PENDING}
        (finding,) = upkeep.check(shop.store)
        assert "probes" in finding.problem and "mergetta hub probe" in finding.remedy
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        shop.build()
        assert upkeep.check(shop.store) == []
        assert {e.state for e in shop.store.experts(FAMILY)} == {ACTIVE}

    def test_they_go_with_a_copy_and_with_the_family(self, shop: Workshop, tmp_path: Path) -> None:
        shop.store.put_probes(FAMILY, FILE.to_bytes())
        copy = Store(f"sqlite:///{tmp_path / 'copy.db'}", str(tmp_path / "copy"))
        assert upkeep.backup(shop.store, copy) == 0
        digest = copy.family(FAMILY).probes
        assert ProbeFile.from_bytes(copy.blob(digest)).views.keys() == FILE.views.keys()
        copy.delete_family(FAMILY)
        assert digest not in copy.blobs.paths()


def test_only_administrators_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "opened", lambda model: Tiny())
    fleet = Fleet(tmp_path)
    with fleet.client:
        fleet.register()
        fleet.store.put_probes(FAMILY, FILE.to_bytes())
        for seed in range(4):
            fleet.upload(honest(seed))
        evil = fleet.upload(expert_of(0.1 * ASIDE), "admin")["id"]
        fleet.settle()
        told = fleet.call("GET", f"/v1/experts/{evil}", "admin").json()
        assert told["state"] == "quarantined" and "probe images" in told["reason"]
        mine = fleet.call("GET", f"/v1/experts/{evil}", "contribute").json()
        assert mine["reason"] == "it is unlike the others" and not {"harm", "probes"} & mine.keys()
        family = fleet.call("GET", f"/v1/families/{FAMILY}", "contribute").json()
        assert "probes" not in family


def test_who_waits_for_images_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "opened", lambda model: Tiny())
    fleet = Fleet(tmp_path, open=False, probe=True)
    fleet.secrets["contribute"], _ = fleet.store.create_token("approved", "contribute", approved=True)
    fleet.store.put_family(family_file().to_bytes(), FAMILY)
    with fleet.client:
        first = fleet.upload(honest(0))
        assert first["state"] == "pending" and first["reason"] == "waits for probe images: mergetta hub probe"
        fleet.settle()
        assert fleet.call("GET", f"/v1/families/{FAMILY}", "consume").json()["lacks_probes"]
        for path in (BUNDLE, f"/v1/families/{FAMILY}/current", f"{BUNDLE}/summary"):
            answer = fleet.call("GET", path, "consume")
            assert answer.status_code == 404 and "lacks probe images" in answer.json()["detail"]
        fleet.store.put_probes(FAMILY, FILE.to_bytes())
        fleet.settle()
        assert not fleet.call("GET", f"/v1/families/{FAMILY}", "consume").json()["lacks_probes"]
        assert fleet.states() == {"domain-0": "active"}


class TestImages:
    def test_that_say_nothing_are_refused(self) -> None:
        """Black ones, a single class, ones that the model does not know: on these no expert could do harm."""
        same = ProbeFile(b"m", {"clean": np.repeat(IMAGES[:1], 24, axis=0)})
        with pytest.raises(MergettaError, match="for one class"):
            Probes(same, runtime=Tiny()).check()
        lost = ProbeFile(b"m", {"clean": IMAGES, "inverted": 255 - IMAGES})
        with pytest.raises(MergettaError, match="no better than guesses"):
            Probes(lost, runtime=Tiny()).check()
        Probes(FILE, runtime=Tiny()).check()

    def test_none_counts_twice(self) -> None:
        twice = np.concatenate([IMAGES[:9], IMAGES[:9]])
        assert len(different(twice, 32)) == 9 and len(different(IMAGES, 8)) == 8
        with pytest.raises(MergettaError, match="at least 8 different images: here are 7"):
            different(twice[[*range(7), *range(9, 16)]], 32)


class TestFile:
    def test_round_trip(self) -> None:
        again = ProbeFile.from_bytes(FILE.to_bytes())
        assert again.model == FILE.model and list(again.views) == ["clean", "dark"]
        np.testing.assert_array_equal(again.views["dark"], FILE.views["dark"])

    def test_what_lacks_something(self) -> None:
        with pytest.raises(MergettaError, match="lacks"):
            ProbeFile.from_bytes(ProbeFile(b"m", {"dark": IMAGES}).to_bytes())
        with pytest.raises(MergettaError, match="family"):
            ProbeFile.from_bytes(family_file().to_bytes())

    def test_views_are_corrupted(self) -> None:
        file = ProbeFile.of_images(b"m", IMAGES, ["contrast"])
        assert list(file.views) == ["clean", "contrast"]
        assert file.views["contrast"].std() < IMAGES.std()


def test_command(tmp_path: Path) -> None:
    """With a model that `mergetta export` has written: its base is compared with the registered one."""
    from mergetta.cli.adapt import described
    from mergetta.models.family import load_family
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.torch_runtime import TorchRuntime

    made = mergetta("export", "--family", "fashion-bn", "--out", str(tmp_path / "model.onnx"))
    assert made.returncode == 0, made.stderr
    shop = Workshop(tmp_path / "hub", probe=True)
    command = ("hub", "probe", "fashion", "--model", str(tmp_path / "model.onnx"), "--folder", str(tmp_path / "hub"))
    runtime = OnnxRuntime(tmp_path / "model.onnx")
    file = FamilyFile.of_runtime(runtime)
    name = next(iter(file.base))
    other = replace(file, base={**file.base, name: file.base[name] + 1})
    shop.store.put_family(other.to_bytes(), runtime.family)
    result = mergetta(*command)
    assert result.returncode == 2 and "another source model" in result.stderr
    shop.store.delete_family(runtime.family)
    result = mergetta(*command, "--count", "8")
    assert f"{runtime.family} is registered" in result.stdout, result.stderr
    source = load_family("fashion-bn")
    trained = described(source, TorchRuntime(source))
    assert not shop.store.put_family(trained.to_bytes(), runtime.family)  # the same in other words
    registered = shop.store.family_file(runtime.family)
    registered.check_base(trained.base)
    assert (registered.frozen, registered.blocks) == (trained.frozen, trained.blocks)
    result = mergetta(*command, "--count", "8")
    assert "is registered" not in result.stdout
    assert result.returncode == 0 and "16 views of 8 images" in result.stdout, result.stderr
    vectors = {n: file.base[n] + np.float32(0.01) for n in file.base if n.endswith(("weight", "bias"))}
    moved = Expert({**file.base, **vectors}, runtime.family, "fog", None, provenance={"method": "roid"})
    shop.upload(moved)
    shop.build()
    (expert,) = shop.store.experts(runtime.family)
    assert expert.harm is not None and expert.probes == shop.store.family(runtime.family).probes
    result = mergetta("hub", "probe", "--remove", runtime.family, "--folder", str(tmp_path / "hub"))
    assert result.returncode == 0 and shop.store.family(runtime.family).probes == ""
    shop.upload(replace(moved, domain="snow"))
    shop.build()
    assert shop.store.counts(runtime.family) == {ACTIVE: 1, PENDING: 1}
    assert mergetta("hub", "probe", "--folder", str(tmp_path / "hub")).returncode == 2
