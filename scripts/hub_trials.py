"""What a hub must never do: lose what it has acknowledged, fault, or fill the memory. Tried on hubs in processes of
their own; PostgreSQL, S3 and broken files are those of the tests.

python scripts/hub_trials.py kill 100     # kill −9 at random moments under uploads and reads; 8 minutes
python scripts/hub_trials.py fuzz 10000   # broken experts over HTTP; 2 minutes
python scripts/hub_trials.py schema 100   # schemathesis, so many requests of each kind for each route; 5 minutes
python scripts/hub_trials.py restore 5    # two hubs, one of them killed, a backup under load and back; 3 minutes
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hub_results import RunningHub, fabricated, running_hub

from mergetta import Bundle, TorchRuntime, load_family
from mergetta.family_file import FamilyFile
from mergetta.hub.store import Store, upkeep
from tests.hub_parts import FAMILY, family_file, honest, postgres, s3
from tests.test_hub_hostile import mutated

UPLOADERS = 4
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # what the S3 server says of each request


class Load:
    """Uploads to some hubs in turn, by several threads; what was acknowledged is remembered."""

    def __init__(self, family: str, contents: Iterator[bytes], hubs: list[RunningHub]) -> None:
        self.family, self.contents, self.hubs = family, contents, hubs
        self.acknowledged: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.lock, self.ended = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Until it is ended, or all hubs are gone."""
        for turn in itertools.count():
            hub = self.hubs[turn % len(self.hubs)]
            if self.ended.is_set():
                return
            with self.lock:
                data = next(self.contents)
            try:
                status, _ = hub.call("POST", f"/v1/families/{self.family}/experts", data)
                hub.call("GET", f"/v1/families/{self.family}/bundle")
            except (OSError, http.client.HTTPException):
                if len(self.hubs) == 1:
                    return
                continue
            with self.lock:
                self.statuses[status] += 1
                if status in (200, 201):
                    self.acknowledged.add(hashlib.sha256(data).hexdigest())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(UPLOADERS) as threads:
            done = [threads.submit(self.run) for _ in range(UPLOADERS)]
            try:
                yield
            finally:
                self.ended.set()
                for each in done:
                    each.result()
                self.ended.clear()


def missing(store: Store, family: str, acknowledged: set[str]) -> set[str]:
    return acknowledged - {expert.id for expert in store.experts(family)}


def litter(store: Store) -> int:
    """Files that belong to nothing, however young, all of which `--repair` deletes; the hub must not be at work."""
    upkeep.RECENT = -1.0
    found = len(upkeep.check(store, repair=True))
    assert not upkeep.check(store)
    upkeep.RECENT = 3600.0
    return found


def kill(times: str = "100") -> None:
    runtime = TorchRuntime(load_family("fashion-bn"))
    contents = (fabricated(runtime, number).to_bytes() for number in itertools.count())
    chance = random.Random(0)
    with running_hub() as hub:
        hub.call("PUT", f"/v1/families/{runtime.family}", FamilyFile.of_runtime(runtime).to_bytes())
        load = Load(runtime.family, contents, [hub])
        for number in range(1, int(times) + 1):
            with load.running():
                time.sleep(chance.uniform(0.0, 1.0))
                hub.process.kill()
            hub.process.wait()
            store = hub.store()
            with store.database.read() as connection:
                assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
            found = upkeep.check(store)
            assert not found and not missing(store, runtime.family, load.acknowledged), found
            store.close()
            hub.start()
            status, data = hub.call("GET", f"/v1/families/{runtime.family}/bundle")
            assert status in (200, 404), status
            if status == 200:
                Bundle.from_bytes(data)
            print(f"\rkill {number}: {len(load.acknowledged)} uploads acknowledged", end="", flush=True)
        store = hub.store()
        hub.bundle(runtime.family, len(store.experts(runtime.family)))
        hub.stop()
        print(f"\nnone lost, check clean after each; {litter(store)} files belonged to nothing; {dict(load.statuses)}")


def fuzz(number: str = "10000") -> None:
    chance = random.Random(7)
    goods = [honest(seed).to_bytes() for seed in range(20)]
    contents = (mutated(chance.choice(goods), chance) for _ in range(int(number)))
    statuses: Counter[int] = Counter()
    with running_hub() as hub, ThreadPoolExecutor(UPLOADERS) as threads:
        hub.call("PUT", f"/v1/families/{FAMILY}", family_file().to_bytes())
        before = hub.memory("VmHWM")

        def send(data: bytes) -> int:
            return hub.call("POST", f"/v1/families/{FAMILY}/experts", data)[0]

        for part in iter(lambda: list(itertools.islice(contents, 200)), []):
            statuses.update(threads.map(send, part))
            print(f"\r{statuses.total()}: {dict(statuses)}", end="", flush=True)
        assert hub.call("POST", f"/v1/families/{FAMILY}/experts", honest(99).to_bytes())[0] == 201
        store = hub.store()
        hub.bundle(FAMILY, store.counts(FAMILY)["active"])
        found, peak = upkeep.check(store), hub.memory("VmHWM")
        hub.stop()
        print(f"\n{before:.0f} to {peak:.0f} MB; check: {found or 'clean'}; {litter(store)} files belonged to nothing")


def schema(examples: str = "100") -> None:
    """All of schemathesis' checks, but for one: OpenAPI cannot say which bytes are a file that the hub can use."""
    data = honest(0).to_bytes()
    with running_hub() as hub, tempfile.NamedTemporaryFile("w", suffix=".toml") as known:
        hub.call("PUT", f"/v1/families/{FAMILY}", family_file().to_bytes())
        hub.call("POST", f"/v1/families/{FAMILY}/experts", data)
        expert, bundle = (hashlib.sha256(each).hexdigest() for each in (data, hub.bundle(FAMILY, 1).to_bytes()))
        known.write(f'[parameters]\nfamily = "{FAMILY}"\nexpert = "{expert}"\ndigest = "{bundle}"\n')
        known.flush()
        before = hub.memory("VmHWM")
        run = ["run", f"http://127.0.0.1:{hub.port}/openapi.json", "-n", examples, "--seed", "1"]
        run += ["--header", f"Authorization: Bearer {hub.token}", "--exclude-checks", "positive_data_acceptance"]
        for options in (
            ["--config-file", known.name, *run, "--exclude-method", "DELETE"],  # of what is there
            run,  # of anything
        ):
            subprocess.run([str(Path(sys.executable).parent / "schemathesis"), *options], check=False)
            assert hub.call("GET", "/v1/ready")[0] == 200
        print(f"{before:.0f} to {hub.memory('VmHWM'):.0f} MB")


def restore(rounds: str = "5") -> None:
    """What was acknowledged before a backup began is in it, and in the hub that it is restored to."""
    chance = random.Random(0)
    contents = (honest(seed).to_bytes() for seed in itertools.count())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as a user of its own
        with postgres(folder) as database, s3() as blobs:
            places = {"database": database.url, "blobs": blobs.url}
            hubs = [RunningHub(folder, **places) for _ in range(2)]
            hubs[0].call("PUT", f"/v1/families/{FAMILY}", family_file().to_bytes())
            load = Load(FAMILY, contents, hubs)
            for number in range(int(rounds)):
                victim, copy = hubs[number % 2], folder / f"copy-{number}"
                with load.running():
                    time.sleep(chance.uniform(1.0, 3.0))
                    victim.process.kill()
                    with load.lock:
                        before = set(load.acknowledged)
                    command("backup", copy, places)
                    during = len(load.acknowledged) - len(before)
                    victim.process.wait()
                    victim.start()
                shared = hubs[0].store()
                assert not missing(shared, FAMILY, load.acknowledged) and not upkeep.check(shared)
                with shared.database.read() as connection:
                    connection.exec_driver_sql(f"CREATE DATABASE copy{number}")
                shared.close()
                print(f"round {number}: {len(before)} acknowledged before the backup, {during} while it ran", end="; ")
                come_back(folder, copy, before, {
                    "database": database.url.replace("/postgres", f"/copy{number}"), "blobs": f"{blobs.url}-{number}",
                })  # fmt: skip
            print(f"answers: {dict(load.statuses)}")
            for hub in hubs:
                hub.stop()


def come_back(folder: Path, copy: Path, before: set[str], places: dict[str, str]) -> None:
    """A hub that starts from a copy."""
    command("restore", copy, places)
    hub = RunningHub(folder, **places)
    store = hub.store()
    assert not missing(store, FAMILY, before) and not upkeep.check(store)
    print(f"{len(store.experts(FAMILY))} restored, none of these lost", flush=True)
    hub.bundle(FAMILY, len(store.experts(FAMILY)))
    hub.stop()
    store.close()


def command(verb: str, copy: Path, places: dict[str, str]) -> None:
    options = itertools.chain.from_iterable((f"--{name}", value) for name, value in places.items())
    subprocess.run([str(Path(sys.executable).parent / "mergetta"), "hub", verb, str(copy), *options], check=True)


if __name__ == "__main__":
    {"kill": kill, "fuzz": fuzz, "schema": schema, "restore": restore}[sys.argv[1]](*sys.argv[2:])
