"""The device's side of the hub: patient, suspicious, never waiting, and whole after a crash at any moment."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mergetta import Bundle, Expert, MergettaError, ZOMerge, build_bundle
from mergetta.device import agent as agent_module
from mergetta.device import hub_client, hub_link
from mergetta.device.agent import Agent
from mergetta.device.governor import ADAPTING, SETTLED, Governor
from mergetta.device.hub_client import BundleRefused, HubClient, HubError, HubUnreachable, read_key
from mergetta.device.hub_link import HubLink
from mergetta.device.state import bundle_of
from mergetta.device.stream import batched
from mergetta.family_file import FamilyFile

from .numpy_runtime import NumpyRuntime
from .test_cli import mergetta
from .test_device import CLASSES, items_of

FAMILY = NumpyRuntime.family
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def make_bundle(seed: int = 0, family: str = FAMILY, **options: Any) -> Bundle:
    rng, groups = np.random.default_rng(seed), NumpyRuntime().groups
    experts = [{n: v + 0.3 * rng.normal(size=v.shape) for n, v in groups.items()} for _ in range(4)]
    return build_bundle(groups, experts, family=family, **options)


def id_of(bundle: Bundle) -> str:
    return hashlib.sha256(bundle.to_bytes()).hexdigest()


class StubHub:
    """As much of a hub as a device sees, and able to misbehave."""

    def __init__(self) -> None:
        self.bundle: bytes | None = make_bundle().to_bytes()
        self.etag: str | None = None
        self.signature: str | None = None
        self.key: str | None = None
        self.misbehave: list[int] = []
        """Statuses to answer with, once each, before answering properly; −1 breaks off in the body."""
        self.retry_after = "0"
        self.requests: list[tuple[str, str, int]] = []
        self.queries: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.families: dict[str, bytes] = {}
        self.experts: dict[str, bytes] = {}
        self.reports: list[dict[str, Any]] = []
        self.connections: list[socket.socket] = []
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def offer(self, bundle: Bundle) -> str:
        self.bundle = bundle.to_bytes()
        return id_of(bundle)

    def up(self) -> None:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                hub.connections.append(self.connection)

            def log_message(self, *arguments: object) -> None: ...

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.tokens.add(self.headers["Authorization"])
                status, headers, data = hub.answer(self.command, self.path, body, self.headers["If-None-Match"])
                hub.requests.append((self.command, self.path, status))
                self.send_response(max(status, 200))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) + 10 * (status < 0)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection |= status < 0

            do_GET = do_PUT = do_POST = handle_any

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = allow_reuse_address = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        while self.connections:
            with contextlib.suppress(OSError):  # closed by the other side
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def answer(self, method: str, path: str, body: bytes, etag: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.misbehave:
            return self.misbehave.pop(0), {"Retry-After": self.retry_after}, detail("busy")
        parts = urlsplit(path)
        self.queries = parse_qsl(parts.query)
        match method, parts.path.strip("/").split("/")[1:]:
            case "PUT", ["families", family]:
                self.families[family] = body
                return 201, {}, b"{}"
            case "POST", ["families", family, "experts"]:
                if family not in self.families:
                    return 404, {}, detail(f"There is no family '{family}'.")
                id = hashlib.sha256(body).hexdigest()
                status = 200 if id in self.experts else 201
                self.experts[id] = body
                return status, {}, json.dumps({"id": id, "state": "active", "domain": "fog"}).encode()
            case "GET", ["families", _, "bundle"]:
                return self.answer_bundle(etag)
            case "GET", ["blobs", id] if self.bundle and id == hashlib.sha256(self.bundle).hexdigest():
                return self.answer_bundle(None)
            case "POST", ["reports"]:
                reports = json.loads(body)
                if any("poison" in report for report in reports):
                    return 422, {}, detail([{"msg": "poison"}])
                self.reports += reports
                return 201, {}, b"{}"
            case "GET", ["key"] if self.key:
                return 200, {}, json.dumps({"algorithm": "ed25519", "key": self.key}).encode()
        return 404, {}, detail("There is no such thing.")

    def answer_bundle(self, etag: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.bundle is None:
            return 404, {}, detail("There is no bundle yet.")
        id = self.etag or hashlib.sha256(self.bundle).hexdigest()
        if etag == f'"{id}"':
            return 304, {"ETag": f'"{id}"'}, b""
        signed = {} if self.signature is None else {"X-Mergetta-Signature": self.signature}
        return 200, {"ETag": f'"{id}"', **signed}, self.bundle


def detail(text: object) -> bytes:
    return json.dumps({"detail": text}).encode()


@pytest.fixture
def hub() -> Iterator[StubHub]:
    hub = StubHub()
    yield hub
    hub.down()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "BACKOFF", 0.001)


def until(condition: Callable[[], object], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestClient:
    def test_bundle(self, hub: StubHub) -> None:
        client = HubClient(hub.url + "/", token="t0ken")
        fetched = client.bundle(FAMILY, exclude=["fog", "snow"], exclude_own=True)
        assert fetched is not None
        assert (fetched.id, fetched.data) == (id_of(make_bundle()), hub.bundle)
        assert hub.queries == [("exclude", "fog"), ("exclude", "snow"), ("exclude_own", "true")]
        assert hub.tokens == {"Bearer t0ken"}
        assert client.bundle(FAMILY, etag=fetched.id) is None
        assert hub.requests[-1][2] == 304

    def test_retries_then_gives_up(self, hub: StubHub) -> None:
        hub.misbehave = [503, 429, 502, -1]
        assert HubClient(hub.url).bundle(FAMILY) is not None
        assert [status for *_, status in hub.requests] == [503, 429, 502, -1, 200]
        hub.misbehave = [503] * 9
        with pytest.raises(HubError, match="The hub refused: busy") as caught:
            HubClient(hub.url, retries=2).report([{}])
        assert caught.value.status == 503
        assert len(hub.misbehave) == 6

    def test_retry_after_is_respected_within_reason(self, hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_client, "MAX_WAIT", 0.15)
        hub.misbehave, hub.retry_after = [503], "3600"
        began = time.monotonic()
        HubClient(hub.url).bundle(FAMILY)
        assert time.monotonic() - began >= 0.15
        hub.misbehave, hub.retry_after = [503, 202], "soon"
        assert HubClient(hub.url).bundle(FAMILY) is not None

    def test_waits_while_a_bundle_is_built(self, hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.misbehave = [202, 202]
        assert HubClient(hub.url).bundle(FAMILY) is not None
        monkeypatch.setattr(hub_client, "PATIENCE", 0.15)
        hub.misbehave = [202] * 5
        with pytest.raises(HubError, match="still building"):
            HubClient(hub.url).bundle(FAMILY)

    def test_unreachable(self, hub: StubHub) -> None:
        hub.down()
        with pytest.raises(HubUnreachable, match=r"Cannot reach the hub at http://127.0.0.1:\d+: .*refused\.$"):
            HubClient(hub.url, retries=1).bundle(FAMILY)
        hub.up()
        hub.misbehave = [-1] * 3
        with pytest.raises(HubUnreachable):
            HubClient(hub.url, retries=1).bundle(FAMILY)

    def test_says_what_the_hub_says(self, hub: StubHub) -> None:
        hub.bundle = None
        with pytest.raises(HubError, match=r"There is no bundle yet\.") as caught:
            HubClient(hub.url).bundle(FAMILY)
        assert caught.value.status == 404
        hub.misbehave = [301]
        with pytest.raises(HubError, match="busy"):
            HubClient(hub.url).bundle(FAMILY)
        with pytest.raises(HubError, match='"msg": "poison"'):
            HubClient(hub.url).report([{"poison": 1}])

    def test_refuses_what_is_not_announced_of_another_family_or_too_large(
        self, hub: StubHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = HubClient(hub.url)
        hub.etag = "0" * 64
        with pytest.raises(BundleRefused, match="not the one it announced"):
            client.bundle(FAMILY)
        hub.etag = None
        hub.offer(make_bundle(family="other"))
        with pytest.raises(BundleRefused, match="belongs to the family 'other'"):
            client.bundle(FAMILY)
        hub.bundle = b"rubbish"
        with pytest.raises(BundleRefused, match="truncated"):
            client.bundle(FAMILY)
        monkeypatch.setattr(hub_client, "MAX_DOWNLOAD", 6)
        with pytest.raises(HubError, match="more than"):
            client.bundle(FAMILY)

    def test_signatures(self, hub: StubHub, tmp_path: Path) -> None:
        client = HubClient(hub.url, verify_key=PUBLIC)
        with pytest.raises(BundleRefused, match="is not signed, but"):
            client.bundle(FAMILY)
        hub.signature = base64.b64encode(KEY.sign(b"something else")).decode()
        with pytest.raises(BundleRefused, match="not signed by the key"):
            client.bundle(FAMILY)
        hub.signature = "%%%"
        with pytest.raises(BundleRefused, match="not signed by the key"):
            client.bundle(FAMILY)
        assert HubClient(hub.url).bundle(FAMILY) is not None
        assert hub.bundle is not None
        hub.signature = base64.b64encode(KEY.sign(hub.bundle)).decode()
        assert client.bundle(FAMILY) is not None

        assert client.public_key() is None
        hub.key = base64.b64encode(PUBLIC).decode()
        assert client.public_key() == PUBLIC
        (tmp_path / "raw").write_bytes(PUBLIC)
        (tmp_path / "text").write_text(hub.key + "\n")
        assert read_key(hub.key) == read_key(str(tmp_path / "raw")) == read_key(str(tmp_path / "text")) == PUBLIC
        for wrong in ("", "x" * 32, hub.key[:-4], str(tmp_path / "none")):
            with pytest.raises(MergettaError):
                read_key(wrong)
        hub.key = str(tmp_path / "raw")  # a hub does not make us read files
        with pytest.raises(MergettaError, match="Ed25519 public key"):
            client.public_key()

    def test_signatures_need_cryptography(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
        with pytest.raises(MergettaError, match=r"pip install 'mergetta\[signing\]'"):
            HubClient("http://hub", verify_key=PUBLIC)
        HubClient("http://hub")

    def test_families_and_experts(self, hub: StubHub) -> None:
        client = HubClient(hub.url)
        expert = Expert(NumpyRuntime().groups, "a family/1", "fog")
        with pytest.raises(HubError, match="no family 'a%20family%2F1'") as caught:
            client.upload_expert(expert)
        assert caught.value.status == 404
        data = FamilyFile("a family/1", NumpyRuntime().groups).to_bytes()
        client.register_family(data)
        assert hub.families == {"a%20family%2F1": data}
        answers = [client.upload_expert(expert) for _ in range(2)]
        assert answers[0] == answers[1]
        assert hub.experts == {answers[0]["id"]: expert.to_bytes()}
        with pytest.raises(MergettaError, match="which family"):
            client.upload_expert(Expert(NumpyRuntime().groups))

    def test_bad_options(self, tmp_path: Path) -> None:
        for url in ("hub.example", "ftp://hub", "http://", "http://hub?x=1", "http://[", ""):
            with pytest.raises(MergettaError, match="must look like"):
                HubClient(url)
        with pytest.raises(MergettaError, match="no file of certificate authorities"):
            HubClient("https://hub", ca=tmp_path / "none")
        for token in ("two\nlines", "ké", "a b"):
            with pytest.raises(MergettaError, match="token"):
                HubClient("https://hub", token)


@pytest.fixture
def link(hub: StubHub, tmp_path: Path) -> Callable[..., HubLink]:
    def make(**options: Any) -> HubLink:
        options = {"refresh": None, "groups": NumpyRuntime().groups, **options}
        client = options.pop("client", None) or HubClient(hub.url, retries=0, timeout=2)
        return HubLink(client, FAMILY, tmp_path / "hub", "camera-7", **options)

    return make


def cached(folder: Path) -> set[str]:
    return {path.stem.removeprefix("bundle-") for path in (folder / "hub").glob("bundle-*.safetensors")}


class TestLink:
    def test_newer_bundles_are_told_once_and_old_ones_kept_until_told(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        it = link()
        assert id_of(it.start()) == it.id
        first = it.id
        it.sync()
        assert it.newer() is None
        second = hub.offer(make_bundle(1))
        it.sync()
        newer = it.newer()
        assert newer is not None
        assert (newer[1], id_of(newer[0])) == (second, second)
        assert it.newer() is None
        assert cached(tmp_path) == {first, second}
        third = hub.offer(make_bundle(2))
        it.sync()
        it.keep(second)
        assert cached(tmp_path) == {second, third}
        hub.offer(make_bundle(1))  # the hub goes back to what we have
        it.sync()
        assert it.newer() is None
        it.keep(second)
        assert cached(tmp_path) == {second}

    def test_starts_offline_from_the_cache(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = link()
        first.start()
        os.utime(first.cache.path(first.id), (1, 1))
        second = hub.offer(make_bundle(1))
        first.sync()
        (tmp_path / "hub" / f"bundle-{'0' * 64}.safetensors").write_bytes(b"damaged")
        hub.down()
        again = link()
        assert id_of(again.start()) == second
        assert "Cannot reach the hub" in caplog.text
        assert id_of(link().start(first.id)) == first.id  # what the state refers to
        with pytest.raises(MergettaError, match="does not hold the bundle 111111111111 that the state refers to"):
            link().start("1" * 64)
        again.cache.prune(set())
        with pytest.raises(MergettaError, match=r"Cannot reach the hub.*does not hold a bundle of this family\."):
            link().start()

    def test_the_bundle_of_the_state_comes_first(self, hub: StubHub, link: Callable[..., HubLink]) -> None:
        old = link()
        old.start()
        second = hub.offer(make_bundle(1))
        it = link()
        assert id_of(it.start(old.id)) == old.id
        it.sync()
        newer = it.newer()
        assert newer is not None
        assert newer[1] == second
        it.cache.prune(set())
        assert id_of(link().start(second)) == second  # lost here, but the hub still has it
        it.cache.prune(set())
        with pytest.raises(MergettaError, match=r"does not hold the bundle .* Delete the state"):
            link().start(old.id)

    def test_refused_counted_and_logged_once(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        it = link()
        it.start()
        small = {"a.weight": np.ones(3, np.float32)}
        huge = make_bundle(1)
        for number, bad in enumerate(
            [
                b"rubbish",
                make_bundle(1, family="other").to_bytes(),
                build_bundle(small, [small], family=FAMILY).to_bytes(),
                Bundle(
                    huge.base,
                    {n: 3e38 * np.ones_like(v) for n, v in huge.basis.items()},
                    {n: 9 + w for n, w in huge.coefficients.items()},
                    family=FAMILY,
                ).to_bytes(),
            ],
            1,
        ):
            hub.bundle = bad
            with np.errstate(over="ignore"):
                it.sync()
                it.sync()
            assert it.refused == number == len(caplog.records)
            assert it.newer() is None
        assert cached(tmp_path) == {it.id}
        hub.offer(make_bundle(1))
        it.sync()
        assert it.newer() is not None

    def test_reports_survive_and_are_bounded(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_link, "MAX_REPORTS", 7)
        monkeypatch.setattr(hub_link, "REPORTS_PER_REQUEST", 3)
        it = link()
        it.start()
        hub.down()
        for number in range(10):
            it.report({"batches": number})
        it.sync()
        assert len(it.queue) == 7
        with (tmp_path / "hub" / "reports.jsonl").open("ab") as file:
            file.write(b'{"half a rep')
        hub.up()
        again = link()
        again.report({"batches": 10})
        again.sync()
        assert [report["batches"] for report in hub.reports] == [4, 5, 6, 7, 8, 9, 10]
        assert {(report["family"], report["device"]) for report in hub.reports} == {(FAMILY, "camera-7")}
        assert abs(hub.reports[0]["time"] - time.time()) < 60
        assert (tmp_path / "hub" / "reports.jsonl").read_bytes() == b""

    def test_reports_that_no_hub_takes_do_not_hold_up_others(
        self, hub: StubHub, link: Callable[..., HubLink], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = link()
        it.start()
        for report in ({"batches": 1}, {"poison": 1}, {"batches": 2}, {"batches": 3}):
            it.report(report)
        hub.misbehave = [304, 401]  # no newer bundle; then a token that may yet become valid
        it.sync()
        assert len(it.queue) == 4
        it.sync()
        assert len(it.queue) == 0
        assert [report["batches"] for report in hub.reports] == [1, 2, 3]

    def test_a_full_disk_does_not_stop_the_device(
        self, link: Callable[..., HubLink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(path: Path, data: bytes) -> None:
            raise MergettaError("Cannot write: no space.")

        it = link()
        it.start()
        monkeypatch.setattr(hub_link, "write_atomically", full)
        it.report({})
        it.sync()
        assert "no space" in caplog.text

    def test_in_the_background(self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path) -> None:
        it = link(refresh=0.02)
        it.start()
        second = hub.offer(make_bundle(1))
        until(lambda: second in cached(tmp_path))
        until(lambda: it.newer())
        hub.down()
        it.report({"batches": 1})
        until(lambda: "Cannot reach" in it._told.get("reports", ""))
        hub.up()
        until(lambda: hub.reports)
        it.report({"batches": 2})
        it.stop()
        assert [report["batches"] for report in hub.reports] == [1, 2]
        assert not it._thread.is_alive()

    def test_the_loop_never_waits_and_stopping_is_bounded(
        self, hub: StubHub, link: Callable[..., HubLink], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Even if the network hangs, or something we did not think of happens."""

        released = threading.Event()

        class Hanging(HubClient):
            def bundle(self, *arguments: Any, **options: Any) -> Any:
                released.wait(20)
                raise RuntimeError("unthought of")

        link().start()
        state = id_of(make_bundle())
        it = link(client=Hanging(hub.url), refresh=0.05)
        it.start(state)
        assert it.newer() is None
        it.report({"batches": 1})
        it.keep(state)
        it.stop(0.05)
        assert it._thread.is_alive()  # we are here, although it hangs
        released.set()
        it._thread.join(20)
        assert not it._thread.is_alive()
        assert "unthought of" in caplog.text
        assert len(hub.reports) == 1

    def test_bad_options(self, link: Callable[..., HubLink]) -> None:
        with pytest.raises(MergettaError, match="refresh"):
            link(refresh=0)
        with pytest.raises(MergettaError, match="device name"):
            HubLink(HubClient("http://hub"), FAMILY, Path("hub"), "front door")


class Killed(BaseException):
    """The power goes, right here."""


def make_agent(link: HubLink, folder: Path, **options: Any) -> Agent:
    bundle = link.start(bundle_of(folder / "state"))
    governor = Governor(ZOMerge(NumpyRuntime(), bundle, loss="entropy", lr=1e-3, delta=0.1))
    return Agent(governor, CLASSES, folder / "out.jsonl", folder / "state", link, **options)


def run_with_swap(hub: StubHub, link: Callable[..., HubLink], folder: Path, arm: Callable[..., None]) -> None:
    """Six batches; the hub offers another bundle before the fourth."""
    hub.offer(make_bundle())
    it = link()
    agent = make_agent(it, folder)
    for number, batch in enumerate(batched(iter(items_of(48)), 8)):
        if number == 3:
            hub.offer(make_bundle(1))
            arm(it, agent)
            it.sync()
        agent.step(batch)
    agent._file.close()


class TestAgent:
    def test_swaps_between_batches_and_reports(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        first, it = id_of(make_bundle()), link()
        agent = make_agent(it, tmp_path, report_every=4)
        summaries = []
        for number, summary in enumerate(agent.run(batched(iter(items_of(56)), 8))):
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
            "family", "device", "time", "bundle", "state", "batches", "images", "bad", "steps", "shifts", "rollbacks",
            "entropy", "loss", "forwards", "coefficients",
        }  # fmt: skip
        assert report["state"] in (ADAPTING, SETTLED)
        assert isinstance(report["loss"], float)
        adapter = agent.governor.adapter
        w = np.concatenate([adapter.coefficients[n] for n in adapter.bundle.moving])
        w0 = np.concatenate([adapter.bundle.coefficients[n] for n in adapter.bundle.moving])
        assert report["coefficients"] == {
            "dimension": adapter.bundle.dimension,
            "norm": pytest.approx(np.linalg.norm(w)),
            "moved": pytest.approx(np.linalg.norm(w - w0)),
        }

    def test_a_bundle_it_cannot_use_leaves_it_as_it_was(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        it = link(groups=None)  # so that the link lets it through
        agent = make_agent(it, tmp_path)
        small = {"a.weight": np.ones(3, np.float32)}
        hub.offer(build_bundle(small, [small], family=FAMILY))
        it.sync()
        before = agent.governor.state_dict()
        agent._take_newer()
        for name, value in before.items():
            np.testing.assert_array_equal(agent.governor.state_dict()[name], value)
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
                    kill_after(it, "_check")
                case "bundle cached":
                    kill_after(it.cache, "put")
                case "bundle taken":
                    kill_after(it, "newer")
                case "swapped":
                    kill_after(agent.governor, "swap")
                case "predictions written":
                    kill_after(agent, "_write")
                case "state saved":
                    kill_after(agent, "_summarise")
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
        list(agent.run(batched(iter(items_of(48)[agent.position :]), 8)))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
        assert (tmp_path / "state").read_bytes() == (tmp_path / "whole" / "state").read_bytes()
        assert cached(tmp_path) == {id_of(make_bundle(1))}

    def test_really_killed(self, hub: StubHub, tmp_path: Path) -> None:
        """kill −9 with the new bundle swapped in, but not yet in the state; then offline."""
        code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from tests.test_hub_client import *
folder = Path({str(tmp_path)!r})
agent = make_agent(HubLink(HubClient({hub.url!r}), FAMILY, folder / "hub", "d", refresh=0.02), folder)
for batch in batched(iter(items_of(10**4)), 8):
    agent._take_newer()
    if agent.bundle != {id_of(make_bundle())!r}:
        os.kill(os.getpid(), {int(signal.SIGKILL)})
    agent.step(batch)
    if agent.position == 24:
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
        assert agent.governor.adapter.steps > 0
        hub.up()

    def test_bad_options(self, link: Callable[..., HubLink], tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="report_every"):
            make_agent(link(), tmp_path, report_every=0)


class TestCommands:
    def test_adapt_and_build(self, hub: StubHub, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8))
        adapt = ["adapt", "x.npz", "--out", "e.safetensors", "--hub", hub.url, "--token", "abc"]
        result = mergetta(*adapt, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        expert = Expert.load(tmp_path / "e.safetensors")
        assert list(hub.experts.values()) == [expert.to_bytes()]
        assert FamilyFile.from_bytes(hub.families[expert.family]).family == expert.family
        assert hub.tokens == {"Bearer abc"}
        assert "active" in result.stdout

        bundle = build_bundle(FamilyFile.from_bytes(hub.families[expert.family]).base, [expert], family=expert.family)
        hub.offer(bundle)
        result = mergetta("build", "--hub", hub.url, "--out", "b.safetensors", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "b.safetensors").read_bytes() == bundle.to_bytes()
        assert id_of(bundle)[:12] in result.stdout
        refused = mergetta("build", "e.safetensors", "--hub", hub.url, "--out", "b.safetensors", cwd=tmp_path)
        assert refused.returncode == 2
        assert "either expert files or --hub" in " ".join(refused.stderr.split())

    def test_run(self, hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Model(NumpyRuntime):
            metadata: ClassVar = {"classes": CLASSES, "channels": 1, "size": 6}

            def __init__(self, path: Path, threads: int | None) -> None:
                super().__init__()

        monkeypatch.setattr("mergetta.runtimes.onnx_runtime.OnnxRuntime", Model)
        np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).integers(0, 256, (20, 6, 6), dtype=np.uint8))
        hub.bundle = make_bundle().to_bytes()
        hub.signature = base64.b64encode(KEY.sign(hub.bundle)).decode()
        signed = ["--verify-key", base64.b64encode(PUBLIC).decode()]
        run = ["run", "--model", "m.onnx", "--images", "x.npz", "--batch-size", 5]
        options = ["--state", "s", "--device", "door", "--exclude", "fog", "--exclude-own", "--json"]
        result = mergetta(*run, "--hub", hub.url, *signed, *options, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["bundle"] == id_of(make_bundle())
        assert [(report["device"], report["images"]) for report in hub.reports] == [("door", 20)]
        assert "bundle?exclude=fog&exclude_own=true" in hub.requests[0][1]
        assert (tmp_path / "mergetta-hub" / "reports.jsonl").read_bytes() == b""

        for wrong in (run, [*run, "--hub", hub.url, "--bundle", "b.safetensors"]):
            result = mergetta(*wrong, cwd=tmp_path)
            assert result.returncode == 2
            assert "Give one of --bundle, --hub and --experts" in " ".join(result.stderr.split())
        hub.signature = None
        result = mergetta(*run, "--hub", hub.url, *signed, "--hub-folder", "new", cwd=tmp_path)
        assert result.returncode == 2
        assert "is not signed" in " ".join(result.stderr.split())
