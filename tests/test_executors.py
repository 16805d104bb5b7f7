"""Sweeps: on processes and on a real Ray cluster of two nodes; what fails is retried, reported, and stops nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mergetta import MergettaError
from mergetta.bench import executors, pools, runner
from mergetta.bench.executors import Executor, ProcessExecutor, RayExecutor, Task, attempt, check_reachable
from mergetta.bench.runner import ELSEWHERE, Part, run_sweep
from mergetta.bench.suite import Suite

from .suites import small
from .tasks import PATIENCE, await_, copy, count_threads, linger_on, make, meet, stumble
from .test_cli import mergetta
from .test_corrupt import session_lives

ROOT = Path(__file__).parents[1]
PLACES = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
"""Where other processes find tests.tasks, and this code rather than an installed one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", PLACES)
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        cluster.add_node(**node)
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def on_ray(cluster: Any) -> Iterator[RayExecutor]:
    with RayExecutor(cluster.address) as executor:
        yield executor


@pytest.fixture(params=["processes", "ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "ray":
        yield request.getfixturevalue("on_ray")
    else:
        with ProcessExecutor(2) as executor:
            yield executor


def test_one_bad_task_stops_no_other(executor: Executor, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    make("given", cache)
    cases = {  # how often it fails and how, the reason in the end, how often it is tried
        "fine": (0, "", None, 1),
        "unlucky": (2, "raise", None, 3),
        "deadly": (99, "die", "tried 3 times", 3),
        "refused": (99, "refuse", "There is no such image.", 1),
        "last": (0, "", None, 1),
        "wounded": (1, "die", None, 2),
        "hopeless": (99, "raise", "RuntimeError: out of luck (tasks.py, line", 3),
    }
    tasks = [
        Task(name, partial(stumble, tmp_path / name, times, how, name), together="abcde".find(name[0]) < 0)
        for name, (times, how, _, _) in cases.items()
    ]
    tasks.append(Task("copy", partial(copy, "given", "copy"), needs=("given",)))
    tasks.append(Task("threads", partial(count_threads, "threads")))
    reasons = {task.name: reason for task, reason in executor.run(tasks, cache)}
    assert reasons.pop("copy") is None
    assert reasons.pop("threads") is None
    assert (cache / "threads").read_text() == "torch 1, OpenCV 1, NumPy 0 more"
    assert reasons.keys() == cases.keys()
    for name, (_, _, reason, tries) in cases.items():
        assert (reason is None and reasons[name] is None) or reason in str(reasons[name]), reasons
        # what was done in a Ray worker that then dies with "wounded" may not have arrived yet, and is done again
        again = name in ("fine", "unlucky", "refused", "last") and not isinstance(executor, ProcessExecutor)
        assert tries <= (tmp_path / name).stat().st_size <= tries + again, name
    good = {name for name, reason in reasons.items() if reason is None}
    assert {path.name for path in cache.iterdir()} == {*good, "given", "copy", "threads"}
    assert [reason for _, reason in executor.run([Task("more", partial(make, "more"))], cache)] == [None]


PARTS = [
    Part(small("bn-stats", "zo-merge", "roid"), "roid", ["fog", "contrast"], [0]),
    Part(small("bn-stats", "zo-merge"), "deyo", ["fog"], [0]),
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runner.Outcome, list[tuple[str, int, int]]]:
    """What two processes make of the parts."""
    cache, seen = tmp_path_factory.mktemp("local"), []
    with ProcessExecutor(2) as executor:
        outcome = run_sweep(PARTS, cache, executor, lambda *step: seen.append(step))
    return cache, outcome, seen


def files(cache: Path) -> set[str]:
    return {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}


def test_parts_share_what_they_have_in_common(local: Any) -> None:
    cache, outcome, seen = local
    assert not outcome.failures
    labels = [[(record["method"], record["domain"]) for record in records] for records in outcome.records]
    assert labels[0] == [(m, d) for d in ("fog", "contrast") for m in ("bn-stats", "zo-merge", "roid")]
    assert labels[1] == [("bn-stats", "fog"), ("zo-merge", "fog")]
    assert len(list((cache / "experts").iterdir())) == 3 + 2
    assert len(list((cache / "results").iterdir())) == 6 + 1 + 1  # roid on gaussian_noise came with its expert
    assert seen[0] == ("roid and deyo experts", 0, 5)
    assert ("roid and deyo experts", 5, 5) in seen
    assert ("results", 0, 5) in seen  # both of roid came with its experts, one of bn-stats is shared
    assert seen[-1] == ("results", 5, 5)


class Inline(Executor):
    """Runs tasks in this process, once."""

    def __init__(self, jobs: int | None = None) -> None:
        self.names: list[str] = []

    def run(self, tasks: Sequence[Task], cache: Path) -> Iterator[tuple[Task, str | None]]:
        for task in tasks:
            self.names.append(task.name)
            problem = attempt(task, cache)
            yield task, problem and problem.reason

    start = next_end = end = __exit__ = lambda *_: None


def test_nothing_is_measured_again(local: Any) -> None:
    cache, outcome, _ = local
    inline = Inline()
    assert run_sweep(PARTS, cache, inline).records == outcome.records
    assert inline.names == []


def test_a_failure_is_reported_and_what_builds_on_it_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fragile(suite: Suite, method: str, domain: str, *rest: Any) -> Any:
        if domain == "contrast":
            raise RuntimeError("out of luck")
        return pools.make_expert(suite, method, domain, *rest)

    monkeypatch.setattr(runner, "make_expert", fragile)
    part = Part(small("bn-stats", "zo-merge"), "roid", ["fog", "contrast"], [0])
    outcome = run_sweep([part], tmp_path, Inline())
    assert [(r["method"], r["domain"]) for r in outcome.records[0]] == [
        ("bn-stats", "fog"), ("bn-stats", "contrast"), ("zo-merge", "contrast"),
    ]  # fmt: skip
    expert, cell = outcome.failures
    assert expert.startswith("fashion-bn: roid expert of contrast at severity 5, seed 0: RuntimeError: out of luck")
    assert cell.startswith("fashion-bn: zo-merge on fog at severity 5, seed 0: not tried, because there is no fashion")
    monkeypatch.undo()
    inline = Inline()
    assert len(run_sweep([part], tmp_path, inline).records[0]) == 4
    assert [name.split(" at ")[0] for name in inline.names] == [
        "fashion-bn: roid expert of contrast", "fashion-bn: zo-merge on fog",
    ]  # fmt: skip


def test_results_of_other_code_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "measure", lambda suite, cell, cache: make("results/other", cache))
    outcome = run_sweep([Part(small("source"), "roid", ["fog"], [0])], tmp_path, Inline())
    assert outcome.records == [[]]
    assert outcome.failures == [f"fashion-bn: source on fog at severity 5, seed 0: {ELSEWHERE}"]


def test_relative_paths_mean_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite = runner.at_hand(small("source").model_copy(update={"folder": Path("images")}))
    assert (suite.folder, suite.checkpoint) == (tmp_path / "images", None)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_sweep(end: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(
        "import signal, sys\nfrom functools import partial\nfrom pathlib import Path\n"
        "from mergetta.bench.executors import ProcessExecutor, Task\n"
        "from tests.tasks import linger, make\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "    folder = Path(sys.argv[1])\n"
        "    tasks = [Task('made', partial(make, 'made'))]\n"
        "    tasks += [Task(name, partial(linger, folder / name)) for name in ('one', 'two')]\n"
        "    with ProcessExecutor(2) as executor:\n"
        "        list(executor.run(tasks, folder))\n"
    )
    environment = {**os.environ, "PYTHONPATH": PLACES}
    process = subprocess.Popen(
        [sys.executable, script, tmp_path], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    await_(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
    process.send_signal(end)
    process.wait(PATIENCE)
    await_(lambda: not session_lives(process.pid))
    assert (tmp_path / "made").read_bytes() == b"made"


def test_workers_that_cannot_start_are_not_tried_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "serve", os._exit)  # given a pipe instead of a number, it fails at once
    with ProcessExecutor(1) as executor, pytest.raises(MergettaError, match="do not start"):
        list(executor.run([Task("any", partial(make, "any"))], tmp_path))


def test_bench_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MergettaError("There is no such image.")

    monkeypatch.setattr(executors, "ProcessExecutor", Inline)
    monkeypatch.setattr(runner, "run_cell", refuse)
    result = mergetta(
        "bench", "fashion-bn", "--methods", "source", "--domains", "fog", "--seeds", 1, "--samples", 20,
        "--cache", tmp_path / "cache", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert result.returncode == 1
    assert "failed: fashion-bn: source on fog at severity 5, seed 0: There is no such image." in result.stderr
    assert "the same command tries only these again" in result.stderr
    assert not (tmp_path / "r.json").exists()


class TestRay:
    def test_both_nodes_work_at_the_same_time(self, on_ray: RayExecutor, tmp_path: Path) -> None:
        guests, cache = tmp_path / "guests", tmp_path / "cache"
        guests.mkdir()
        tasks = [Task(name, partial(meet, guests, 2, name)) for name in ("one", "two")]
        assert [reason for _, reason in on_ray.run(tasks, cache)] == [None, None]
        assert (cache / "one").read_text() != (cache / "two").read_text()

    def test_results_and_cache_are_those_of_processes(self, on_ray: RayExecutor, local: Any, tmp_path: Path) -> None:
        outcome = run_sweep(PARTS, tmp_path, on_ray)
        assert not outcome.failures
        timeless = [
            [[{**record, "seconds": 0} for record in records] for records in found.records]
            for found in (outcome, local[1])
        ]
        assert timeless[0] == timeless[1]
        assert files(tmp_path) == files(local[0])

    def test_command_line(self, on_ray: RayExecutor, tmp_path: Path) -> None:
        arguments = ["bench", "fashion-bn", "--methods", "source", "--domains", "fog", "--seeds", 1, "--samples", 20]
        result = mergetta(*arguments, "--executor", "ray", "--address", on_ray.address, "--cache", tmp_path)
        assert result.returncode == 0, result.stderr
        assert "average" in result.stdout
        assert len(files(tmp_path)) == 1

    def test_a_lost_node_costs_only_time(self, cluster: Any, on_ray: RayExecutor, tmp_path: Path) -> None:
        (lost,) = cluster.worker_nodes
        tasks = [Task(str(i), partial(linger_on, lost.node_id, tmp_path / "marker")) for i in range(2)]
        ends = on_ray.run(tasks, tmp_path / "cache")
        first = next(ends)
        cluster.remove_node(lost, allow_graceful=False)
        assert [first[1], *(reason for _, reason in ends)] == [None, None]


class TestBadChoices:
    def check(self, sentence: str, *arguments: object) -> None:
        result = mergetta("bench", "fashion-bn", "--methods", "source", "--samples", 20, *arguments)
        assert result.returncode == 2
        assert sentence in " ".join(result.stderr.split())

    def test_executor(self) -> None:
        self.check("no executor 'slurm'; choose local or ray", "--executor", "slurm")
        self.check("add --executor ray", "--address", "auto")

    def test_addresses(self) -> None:
        pytest.importorskip("ray")
        self.check("No Ray cluster answers at 127.0.0.1:1:", "--executor", "ray", "--address", "127.0.0.1:1")
        self.check("must run on a node of the cluster", "--executor", "ray", "--address", "ray://127.0.0.1:10001")
        check_reachable("auto")  # Ray's to find

    def test_without_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        self.check("Ray is not installed: pip install", "--executor", "ray")
