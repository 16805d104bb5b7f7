"""The agent with a hub: swaps between batches, and whole after a crash at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError, ZOMerge, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.wrappers.governed import Governed
from mergetta.device import agent as agent_module
from mergetta.device import hub_link
from mergetta.device.agent import Agent
from mergetta.device.hub_client import HubClient
from mergetta.device.hub_link import HubLink
from mergetta.device.state import bundle_of

from .numpy_runtime import NumpyRuntime
from .stub_hub import FAMILY, StubHub, cached, id_of, make_bundle
from .test_agent import CLASSES, batched, items_of


class Killed(BaseException):
    """The power goes, right here."""


def make_agent(link: HubLink, folder: Path, **options: Any) -> Agent:
    bundle = link.start(bundle_of(folder / "state"))
    adapter = Governed(ZOMerge(NumpyRuntime(), bundle, loss="entropy", lr=1e-3, delta=0.1))
    return Agent(adapter, link.id, CLASSES, folder / "out.jsonl", folder / "state", link, **options)


def run_with_swap(hub: StubHub, link: Callable[..., HubLink], folder: Path, arm: Callable[..., None]) -> None:
    """Six batches; the hub offers another bundle before the fourth."""
    hub.offer(make_bundle())
    it = link()
    agent = make_agent(it, folder)
    for number, batch in enumerate(batched(items_of(48), 8)):
        if number == 3:
            agent.save()
            hub.offer(make_bundle(1))
            arm(it, agent)
            it.sync()
        agent.step(batch)
    agent.save()
    agent.predictions.close()


class TestAgent:
    def test_swaps_between_batches_and_reports(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        first, it = id_of(make_bundle()), link()
        agent = make_agent(it, tmp_path, report_every=4)
        summaries = []
        for number, summary in enumerate(agent.run(batched(items_of(56), 8))):
            summaries.append(summary)
            if number == 4:
                second = hub.offer(make_bundle(1))
                it.sync()
        assert [summary.bundle for summary in summaries] == [first] * 5 + [second] * 2
        assert bundle_of(tmp_path / "state") == second
        assert cached(tmp_path) == {second}
        it.sync()
        assert [(r["batches"], r["images"], r["bundle"]) for r in hub.reports] == [(4, 32, first), (7, 56, second)]
        report = hub.reports[1]
        assert set(report) == {
            "family", "device", "time", "bundle", "state", "batches", "images", "bad", "steps", "shifts", "fallbacks",
            "refused", "entropy", "loss", "forwards", "moved", "weights",
        }  # fmt: skip
        assert report["state"] in (ADAPTING, SETTLED)
        assert isinstance(report["loss"], float)
        adapter = agent.adapter.adapter
        w = np.concatenate([adapter.coefficients[n] for n in adapter.bundle.moving])
        w0 = np.concatenate([adapter.bundle.coefficients[n] for n in adapter.bundle.moving])
        assert report["moved"] == pytest.approx(np.linalg.norm(w - w0))
        assert report["weights"] == {}

    def test_a_bundle_it_cannot_use_leaves_it_as_it_was(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        it = link(groups=None)  # so that the link lets it through
        agent = make_agent(it, tmp_path)
        small = {"a.weight": np.ones(3, np.float32)}
        hub.offer(build_bundle(small, [small], family=FAMILY))
        it.sync()
        before = agent.adapter.state_dict()
        agent._take_newer()
        for name, value in before.items():
            np.testing.assert_array_equal(agent.adapter.state_dict()[name], value)
        assert agent.bundle == id_of(make_bundle())
        assert it.refused == 1
        it.sync()
        assert it.newer() is None

    @pytest.mark.parametrize("place", [
        "before the bundle is cached", "bundle cached", "bundle taken", "swapped", "predictions written", "state saved",
        "state durable", "while pruning",
    ])  # fmt: skip
    def test_killed_anywhere_around_a_swap(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a restart the predictions are those of an undisturbed run, and so is the bundle."""
        (tmp_path / "whole").mkdir()
        run_with_swap(hub, link, tmp_path / "whole", lambda *_: None)
        for path in (tmp_path / "hub").iterdir():
            path.unlink()

        def kill_after(owner: object, name: str) -> None:
            original = getattr(owner, name)

            def killed(*arguments: Any) -> None:
                original(*arguments)
                raise Killed

            monkeypatch.setattr(owner, name, killed)

        def arm(it: HubLink, agent: Agent) -> None:
            match place:
                case "before the bundle is cached":
                    kill_after(hub_link, "check_usable")
                case "bundle cached":
                    kill_after(it.cache, "put")
                case "bundle taken":
                    kill_after(it, "newer")
                case "swapped":
                    kill_after(agent.adapter, "swap")
                case "predictions written":
                    kill_after(agent, "_write")
                case "state saved":
                    kill_after(agent, "_save")
                case "state durable":
                    kill_after(agent_module, "make_durable")
                case _:
                    kill_after(it.cache, "prune")

        with pytest.raises(Killed):
            run_with_swap(hub, link, tmp_path, arm)
        monkeypatch.undo()
        it = link()
        agent = make_agent(it, tmp_path)
        assert agent.position in (24, 32)
        it.sync()
        list(agent.run(batched(items_of(48)[agent.position :], 8)))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
        assert (tmp_path / "state").read_bytes() == (tmp_path / "whole" / "state").read_bytes()
        assert cached(tmp_path) == {id_of(make_bundle(1))}

    def test_really_killed(self, hub: StubHub, tmp_path: Path) -> None:
        """kill −9 with the new bundle swapped in, but not yet in the state; then offline."""
        code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from tests.test_hub_agent import *
folder = Path({str(tmp_path)!r})
agent = make_agent(HubLink(HubClient({hub.url!r}), FAMILY, folder / "hub", "d", refresh=0.02), folder)
for batch in batched(items_of(10**4), 8):
    agent._take_newer()
    if agent.bundle != {id_of(make_bundle())!r}:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    agent.step(batch)
    if agent.position == 24:
        agent.save()
        print("three batches", flush=True)
    time.sleep(0.002)
"""
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"three batches\n"
        second = hub.offer(make_bundle(1))
        assert process.wait(20) == -signal.SIGKILL
        process.stdout.close()
        assert bundle_of(tmp_path / "state") == id_of(make_bundle())
        assert cached(tmp_path) == {id_of(make_bundle()), second}
        hub.down()
        agent = make_agent(HubLink(HubClient(hub.url), FAMILY, tmp_path / "hub", "d", refresh=None), tmp_path)
        assert agent.bundle == id_of(make_bundle())
        assert agent.position >= 24
        assert agent.adapter.adapter.steps > 0
        hub.up()

    def test_bad_options(self, link: Callable[..., HubLink], tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="report_every"):
            make_agent(link(), tmp_path, report_every=0)
