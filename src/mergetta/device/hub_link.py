"""What the loop sees of the hub: newer bundles between batches, and a place to leave reports; never a wait.

A thread of its own asks and sends. Bundles and reports are on disk before anybody relies on them, so a device that
starts without a network goes on with what it had, and tells later what it did.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import random
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergetta.bundle import Bundle
from mergetta.device.hub_client import BundleRefused, Fetched, HubClient, HubError, read_key
from mergetta.errors import MergettaError
from mergetta.files import make_durable, read_bytes, write_atomically
from mergetta.groups import GroupValues, check_base, check_groups
from mergetta.runtimes.base import Runtime

log = logging.getLogger(__name__)
MAX_REPORTS = 1000
REPORTS_PER_REQUEST = 100
HURRY = 1.0
"""Seconds that a device with a bundle of its own waits for the hub's word when it starts."""
DEVICE_NAME = r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,199}"
"""What hubs take; a name that none takes must not come to light report by report."""


def connect(
    hub: str,
    runtime: Runtime,
    token: str | None = None,
    ca: str | Path | None = None,
    verify_key: str | Sequence[str] = (),
    device: str | None = None,
    folder: str | Path = "mergetta-hub",
    refresh: float | None = 60,
    exclude: Sequence[str] = (),
    exclude_own: bool = False,
) -> HubLink:
    """A link for the model of a runtime; `device` (default: the host's name) is what reports call it."""
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would tell of every retry, for days
    keys = [verify_key] if isinstance(verify_key, str) else verify_key or ()
    client = HubClient(hub, token, ca=ca, verify_keys=[read_key(key) for key in keys])
    name = device or platform.node() or "device"
    return HubLink(client, runtime.family, Path(folder), name, refresh, exclude, exclude_own, runtime.groups)


def variant_folder(exclude: Sequence[str], exclude_own: bool) -> str:
    """Bundles without some domains are kept apart: none of them may stand in for another."""
    if not exclude and not exclude_own:
        return "."
    return "without-" + hashlib.sha256(repr((sorted(set(exclude)), exclude_own)).encode()).hexdigest()[:12]


class HubLink:
    """`start` gives the bundle to begin with; `newer` a newer one, once; `keep` says which one the state now needs.

    A bundle that does not verify, or does not fit the model (`groups`), is refused, counted and logged once. With
    `refresh=None` there is no thread, and the caller calls `sync` when it suits.
    """

    def __init__(
        self,
        client: HubClient,
        family: str,
        folder: Path,
        device_name: str,
        refresh: float | None = 60,
        exclude: Sequence[str] = (),
        exclude_own: bool = False,
        groups: GroupValues | None = None,
    ) -> None:
        if refresh is not None and not refresh > 0:
            raise MergettaError(f"refresh must be a positive number of seconds, not {refresh}.")
        if not re.fullmatch(DEVICE_NAME, device_name):
            raise MergettaError(f"A device name is letters, digits and ._@:+- (at most 200), not {device_name!r}.")
        self.client, self.family, self.device_name, self.refresh = client, family, device_name, refresh
        self.exclude, self.exclude_own, self.groups = tuple(exclude), exclude_own, groups
        self.cache = BundleCache(Path(folder) / variant_folder(self.exclude, exclude_own))
        self.queue = ReportQueue(Path(folder) / "reports.jsonl")
        self.id = ""
        """Of the bundle in use."""
        self.refused = 0
        self._newer: tuple[Bundle, str] | None = None
        self._latest: str | None = None  # what the hub last gave us, in use or not
        self._lock = threading.Lock()  # over `_newer` and what is in the cache
        self._told: dict[str, str] = {}
        self._asked = threading.Event()  # once
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, id: str | None = None) -> Bundle:
        """The bundle with this id, if a state refers to one; else the hub's newest, or the last one it gave us.

        Whoever has one and a thread does not wait long: what the hub says later comes as a newer one.
        """
        held = self._cached(id) if id else None
        found = (held, id) if held and id else None
        if found is None and id is None and self.refresh is not None:
            found = self._newest_cached()
        if found is None:
            bundle, self.id, fresh = self._first(id)
            self._ask_from_now_on((self.refresh or 0.0) if fresh else 0.0)
            return bundle
        bundle, self.id = found
        self._latest = self.id
        self._ask_from_now_on(0.0)
        if id is None and self._asked.wait(HURRY) and (newer := self.newer()):
            bundle, self.id = newer
        return bundle

    def _ask_from_now_on(self, delay: float) -> None:
        if self.refresh is not None:
            self._thread = threading.Thread(target=self._run, args=(delay,), name="mergetta-hub", daemon=True)
            self._thread.start()

    def newer(self) -> tuple[Bundle, str] | None:
        """A bundle to change to, and its id: already on disk, and told only once."""
        with self._lock:
            newer, self._newer = self._newer, None
        return None if newer is None or newer[1] == self.id else newer

    def keep(self, id: str) -> None:
        """This bundle is in use and the state on disk says so: others are needed no more."""
        with self._lock:
            self.id = id
            self.cache.prune({id} if self._newer is None else {id, self._newer[1]})

    def refuse(self, problem: MergettaError) -> None:
        """The device could not use the newer bundle after all, and stays with its own."""
        with self._lock:
            self.cache.prune({self.id} if self._newer is None else {self.id, self._newer[1]})
        self._note("bundle", BundleRefused(str(problem)))

    def report(self, report: dict[str, Any]) -> None:
        """Leave a report; a full disk must not stop the device."""
        try:
            self.queue.add({"family": self.family, "device": self.device_name, "time": time.time(), **report})
        except MergettaError as error:
            self._note("queue", error)

    def sync(self) -> None:
        """Ask for a newer bundle and send what is waiting; what the network does to that is noted, not raised."""
        try:
            self._fetch()
        except MergettaError as error:
            self._note("bundle", error)
        else:
            self._note("bundle", None)
        self._send()

    def stop(self, timeout: float = 5.0) -> None:
        """Send what is waiting, for at most so many seconds; the rest is sent after the next start."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, delay: float) -> None:
        assert self.refresh is not None
        while not self._stopping.wait(delay):
            try:
                self.sync()
            except Exception:  # whatever it was, the device predicts on, and the next round may fare better
                log.exception("The hub could not be asked")
            self._asked.set()
            delay = self.refresh * random.uniform(0.9, 1.1)  # a fleet that started together does not ask together
        self._send()

    def _first(self, id: str | None) -> tuple[Bundle, str, bool]:
        """(bundle, its id, whether the hub gave it) for a start without the bundle that the state wants, if any."""
        try:
            if id:
                self._take(self.client.blob(self.family, id), any_age=True)
            else:
                self._fetch()
            if self._newer is None:
                raise HubError("The hub did not send a bundle.")
        except MergettaError as error:
            found = None if id else self._newest_cached()
            if found is None:
                wanted = f"the bundle {id[:12]} that the state refers to" if id else "a bundle of this family"
                advice = " Delete the state to start anew." if id else ""
                raise MergettaError(f"{error} And {self.cache.folder} does not hold {wanted}.{advice}") from error
            self._note("bundle", error)
            self._latest = found[1]
            return *found, False
        (bundle, got), self._newer = self._newer, None
        return bundle, got, not id  # a bundle asked for by its id may not be the newest

    def _fetch(self) -> None:
        fetched = self.client.bundle(self.family, self._latest, self.exclude, self.exclude_own)
        if fetched is not None:
            self._take(fetched)

    def _take(self, fetched: Fetched, any_age: bool = False) -> None:
        check_usable(fetched.bundle, self.groups)
        if not any_age:
            check_age(fetched.bundle, [cached for id in self.cache.newest_first() if (cached := self._cached(id))])
        with self._lock:
            self.cache.put(fetched.id, fetched.data)
            self._newer = fetched.bundle, fetched.id
        self._latest = fetched.id

    def _cached(self, id: str) -> Bundle | None:
        """From the cache, with the same suspicion as from the hub."""
        try:
            bundle = self.cache.get(id)
            check_usable(bundle, self.groups)
        except MergettaError:
            return None
        return bundle if bundle.family == self.family else None

    def _newest_cached(self) -> tuple[Bundle, str] | None:
        for id in self.cache.newest_first():
            if bundle := self._cached(id):
                return bundle, id
        return None

    def _send(self) -> None:
        size = REPORTS_PER_REQUEST
        while reports := self.queue.oldest(size):
            problem: HubError | None = None
            try:
                self.client.report(reports)
            except HubError as error:
                problem = error
            self._note("reports", problem)
            if problem is not None and problem.status not in (400, 413, 422):
                return
            if problem is not None and len(reports) > 1:
                size = 1  # one of them is such that no hub will ever take it: find it, so that it holds up no others
                continue
            size = REPORTS_PER_REQUEST if problem else size
            try:
                self.queue.remove(reports)
            except MergettaError as error:
                self._note("queue", error)
                return

    def _note(self, about: str, problem: MergettaError | None) -> None:
        """Log a problem when it is new, not each time it is met again, nor for bundles and for reports."""
        text = "" if problem is None else str(problem)
        if self._told.get(about, "") == text:
            return
        if problem is not None:
            if text not in self._told.values():
                log.warning("%s", text)
            self.refused += isinstance(problem, BundleRefused)
        self._told[about] = text


def check_usable(bundle: Bundle, groups: GroupValues | None) -> None:
    """Refuse what no model could run, or not the one with these groups."""
    try:
        check_groups(bundle.merge(), bundle.base, "The hub's bundle")
        if groups is not None:
            check_base(bundle.base, groups, "The hub's bundle")
    except MergettaError as error:
        raise BundleRefused(str(error)) from error


def check_age(bundle: Bundle, held: Sequence[Bundle]) -> None:
    """Refuse what has expired, or is older than a bundle that we had: its signature does not tell."""
    if age(bundle) < max(map(age, held), default=(0, 0)):
        raise BundleRefused("The hub's bundle is older than the one that this device has.")
    expires = bundle.settings.get("expires")
    if isinstance(expires, (int, float)) and expires < time.time():
        raise BundleRefused("The hub's bundle has expired.")


def age(bundle: Bundle) -> tuple[int, int]:
    """Larger for a newer bundle of a hub."""
    epoch, generation = (bundle.settings.get(name, 0) for name in ("epoch", "generation"))
    return (epoch, generation) if isinstance(epoch, int) and isinstance(generation, int) else (0, 0)


class BundleCache:
    """Bundles in a folder, each named after the sha256 of its content: a damaged one gives itself away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, id: str) -> Path:
        return self.folder / f"bundle-{id}.safetensors"

    def put(self, id: str, data: bytes) -> None:
        write_atomically(self.path(id), data)
        make_durable(self.folder)

    def get(self, id: str) -> Bundle:
        path = self.path(id)
        data = read_bytes(path)
        if hashlib.sha256(data).hexdigest() != id:
            raise MergettaError(f"{path} is damaged: its content is not what its name says.")
        return Bundle.from_bytes(data, str(path))

    def newest_first(self) -> list[str]:
        files = sorted(self.folder.glob("bundle-*.safetensors"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.stem.removeprefix("bundle-") for path in files]

    def prune(self, keep: set[str]) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed takes up space, and does no other harm
            for id in self.newest_first():
                if id not in keep:
                    self.path(id).unlink()


class ReportQueue:
    """Reports that wait to be sent, one JSON object per line; above `MAX_REPORTS` the oldest are given up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        lines = read_bytes(path).splitlines() if path.exists() else []
        self._reports = deque((report for line in lines if (report := parsed(line))), maxlen=MAX_REPORTS)

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: dict[str, Any]) -> None:
        with self._lock:
            self._reports.append(report)
            self._write()

    def oldest(self, count: int) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._reports)[:count]

    def remove(self, reports: list[dict[str, Any]]) -> None:
        """Exactly these: while they were sent, others may have come, and some of these been given up."""
        gone = {id(report) for report in reports}
        with self._lock:
            self._reports = deque((r for r in self._reports if id(r) not in gone), maxlen=MAX_REPORTS)
            self._write()

    def _write(self) -> None:
        write_atomically(self.path, "".join(json.dumps(report) + "\n" for report in self._reports).encode())


def parsed(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not one of ours: a report is not worth failing for."""
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None
