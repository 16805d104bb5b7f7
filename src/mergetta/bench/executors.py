"""Where the tasks of a sweep run: in processes of this machine, or on a Ray cluster.

A task works on a cache folder. One that fails is tried again, up to three times in all, and then reported; it stops no
other. What a task has written is kept from then on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

from mergetta.errors import MergettaError, how_to_install
from mergetta.files import write_atomically
from mergetta.workers import end_with_parent

TRIES = 3
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"), "1"
)
"""A process per core, a thread per process: small models gain nothing from more, and results are the same everywhere.

torch, NumPy and OpenCV read these when they are imported.
"""
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Large activations come in pages of 2 MB instead of 4 kB, which the kernel would hand out one by one, layer by layer:
EfficientNet-lite0 at 224 pixels takes half the time. (Keeping freed memory is faster still, but grows without bound.)
"""
WORKER_ENVIRONMENT = ONE_THREAD | LARGE_PAGES


@dataclass(frozen=True, eq=False)
class Task:
    """One thing to make or to measure. `run` is picklable; it is given the cache folder and leaves its files there."""

    name: str
    run: Callable[[Path], None]
    needs: tuple[str, ...] = ()
    """Files of the cache that it reads, relative to it."""
    together: Hashable = None
    """Tasks for which this is the same (and not None) run in one process, in order: they share what it has loaded."""


class Problem(NamedTuple):
    reason: str
    final: bool = False
    """Trying again would not help."""
    died: bool = False
    """The process is gone, and the tasks ahead with it."""


class Executor(ABC):
    """Runs tasks, `jobs` processes at a time. Use it in a `with`, so that nothing is left running."""

    jobs: int

    def run(self, tasks: Iterable[Task], cache: Path) -> Iterator[tuple[Task, str | None]]:
        """Each task when it is settled: with None, or with the reason why it failed for good."""
        waiting, tries = deque(batches(tasks)), Counter[Task]()
        running: dict[Any, deque[Task]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    batch = waiting.popleft()
                    running[self.start(batch, cache)] = deque(batch)
                place, problem = self.next_end(running, cache)
                ahead = running[place]
                task = ahead.popleft()
                if problem is None:
                    yield task, None
                else:
                    tries[task] += 1
                    if problem.final:
                        yield task, problem.reason
                    elif tries[task] == TRIES:
                        yield task, f"{problem.reason} (tried {TRIES} times)"
                    else:
                        waiting.append([task])
                if not ahead or (problem and problem.died):
                    del running[place]
                    self.end(place, broken=bool(problem and problem.died))
                    if ahead:
                        waiting.append(list(ahead))
        finally:  # on Ctrl-C; what was measured is in the cache
            for place in running:
                self.end(place, broken=True)

    @abstractmethod
    def start(self, batch: Sequence[Task], cache: Path) -> Any:
        """The place where these tasks now run, one after the other."""

    @abstractmethod
    def next_end(self, places: Iterable[Any], cache: Path) -> tuple[Any, Problem | None]:
        """Wait until the current task of one of the places ends, and say how."""

    @abstractmethod
    def end(self, place: Any, broken: bool) -> None:
        """The tasks there are over, or if `broken` they must be."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Leave nothing running."""


def batches(tasks: Iterable[Task]) -> list[list[Task]]:
    groups: dict[Hashable, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task if task.together is None else task.together, []).append(task)
    return list(groups.values())


def attempt(task: Task, cache: Path) -> Problem | None:
    try:
        task.run(cache)
    except MergettaError as error:
        return Problem(str(error), final=True)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return Problem(f"{type(error).__name__}: {' '.join(str(error).split())} ({where})")
    return None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ProcessExecutor(Executor):
    """Processes of this machine, by default one per core, which write straight into the cache.

    Each has a pipe of its own, so that when one dies it is known which task it was at.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or cores()
        self.idle: list[Worker] = []

    def start(self, batch: Sequence[Task], cache: Path) -> Worker:
        worker = self.idle.pop() if self.idle else Worker()
        with suppress(BrokenPipeError):  # it has died: found out when its answer is read
            worker.pipe.send((batch, cache))
        return worker

    def next_end(self, places: Iterable[Worker], cache: Path) -> tuple[Worker, Problem | None]:
        by_pipe = {worker.pipe: worker for worker in places}
        while True:
            worker = by_pipe[wait(list(by_pipe))[0]]  # type: ignore[index]
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                return worker, worker.death()
            if message != Worker.READY:
                return worker, message
            worker.ready = True

    def end(self, place: Worker, broken: bool) -> None:
        if broken:
            place.kill()
        else:
            self.idle.append(place)

    def __exit__(self, *_: object) -> None:
        for worker in self.idle:
            worker.pipe.close()  # there are no more tasks: it ends by itself, and leaves no semaphores
        while self.idle:
            worker = self.idle.pop()
            worker.process.join(timeout=5)
            worker.kill()


class Worker:
    """A process that takes tasks from a pipe and answers after each."""

    READY = "ready"

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.ready = False
        before = {name: os.environ.get(name) for name in WORKER_ENVIRONMENT}
        os.environ.update(WORKER_ENVIRONMENT)
        try:
            self.process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        other.close()

    def death(self) -> Problem:
        self.process.join()
        code = self.process.exitcode or 0
        if not self.ready and code >= 0:  # the fault is not the task's
            raise MergettaError(f"The worker processes do not start (exit code {code}): see their message above.")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", perhaps for want of memory: try fewer --jobs" if code == -signal.SIGKILL else ""
        return Problem(f"its process {how}{hint}", died=True)

    def kill(self) -> None:
        """Files are written atomically, so this is safe at any time."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    end_with_parent()
    pipe.send(Worker.READY)
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            batch, cache = pipe.recv()
            for task in batch:
                pipe.send(attempt(task, cache))


class RayExecutor(Executor):
    """A Ray cluster, with one core per task. The nodes share no cache: files travel with the tasks and come back.

    Without an address, a Ray of this machine alone is started for the time of the sweep.
    """

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MergettaError(f"Ray is not installed: {how_to_install('ray')}") from error
        if address and "://" in address:
            raise MergettaError(
                f"The sweep must run on a node of the cluster, not as a client of {address}: log in to one, use `auto`."
            )
        if address:
            check_reachable(address)
        self.ray: Any = ray
        self.address = address
        self.jobs = jobs or sys.maxsize  # Ray queues them, and a cluster that can grow sees that it should
        self.shipped: dict[Path, Any] = {}
        self.connected = False

    def connect(self) -> None:
        if self.ray.is_initialized():
            return
        if self.address is None:
            number = cores() if self.jobs == sys.maxsize else self.jobs
            self.ray.init("local", num_cpus=number, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        else:
            try:
                self.ray.init(self.address, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise MergettaError(f"No Ray cluster can be used at {self.address}: {first_line(error)}") from error
        self.connected = True

    def __exit__(self, *_: object) -> None:
        self.shipped.clear()
        if self.connected:
            self.ray.shutdown()
            self.connected = False

    def start(self, batch: Sequence[Task], cache: Path) -> Any:
        self.connect()
        needs = dict.fromkeys(name for task in batch for name in task.needs)
        for name in needs:
            if cache / name not in self.shipped:
                self.shipped[cache / name] = self.ray.put((cache / name).read_bytes())
        files = {name: self.shipped[cache / name] for name in needs}
        options = {"num_cpus": 1, "max_retries": 0, "runtime_env": {"env_vars": WORKER_ENVIRONMENT}}
        return self.ray.remote(num_returns="streaming", **options)(on_a_node).remote(batch, files)

    def next_end(self, places: Iterable[Any], cache: Path) -> tuple[Any, Problem | None]:
        place = self.ray.wait(list(places))[0][0]
        try:
            files, problem = self.ray.get(next(place))
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            return place, Problem(f"{type(cause).__name__}: {first_line(cause)}", died=True)
        for name, data in files.items():
            write_atomically(cache / name, data)
        return place, problem

    def end(self, place: Any, broken: bool) -> None:
        if broken:
            self.ray.cancel(place, force=True)


def check_reachable(address: str) -> None:
    """Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise MergettaError(f"No Ray cluster answers at {address}: {error.strerror or error}.") from error


def on_a_node(batch: Sequence[Task], shipped: Mapping[str, Any]) -> Iterator[tuple[dict[str, bytes], Problem | None]]:
    """Run tasks on a cache of their own; after each, hand back the files that are new."""
    import ray

    with tempfile.TemporaryDirectory(prefix="mergetta-") as folder:
        cache, known = Path(folder), set(shipped)
        for name, data in zip(shipped, ray.get(list(shipped.values())), strict=True):
            write_atomically(cache / name, data)
        for task in batch:
            problem = attempt(task, cache)
            files = {path.relative_to(cache).as_posix(): path for path in cache.rglob("*") if path.is_file()}
            yield {name: path.read_bytes() for name, path in files.items() if name not in known}, problem
            known |= set(files)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]
