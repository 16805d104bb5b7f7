"""The hub as a process: TLS, signatures, kill −9, several hubs on one PostgreSQL and S3, the demo."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from mergetta import Bundle, Expert
from mergetta.device.hub_client import HubClient, HubError, HubUnreachable, read_key
from mergetta.hub import demo
from mergetta.hub.app import create_app
from mergetta.hub.limits import Gate
from mergetta.hub.settings import HubSettings
from mergetta.hub.signing import Signer
from mergetta.hub.store import Store
from mergetta.hub.store.blobs import digest_of

from .hub_parts import FAMILY, S3, Postgres, family_file, free_port, honest, postgres, s3

KILLS = int(os.environ.get("MERGETTA_KILLS", "4"))


def self_signed(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return folder / "cert.pem", folder / "key.pem"


class Serving:
    """`mergetta hub serve`, which can be killed and started again."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http", ca: Path | None = None) -> None:
        self.folder, self.port, self.options = folder, free_port(), options
        settings = HubSettings.in_folder(folder)
        store = Store(settings.database, settings.blobs)
        self.token, _ = store.create_token("test", "admin")
        store.close()
        self.url, self.ca = f"{scheme}://127.0.0.1:{self.port}", ca
        self.start()

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("mergetta")),
            "hub",
            "serve",
            "--no-probe",
            "--folder",
            str(self.folder),
        ]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *self.options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                self.client(retries=0).public_key()
                return
            except HubUnreachable:
                pass
            except HubError:  # a hub without a key has answered
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError("the hub does not start")

    def client(self, **options: object) -> HubClient:
        return HubClient(self.url, self.token, ca=self.ca, **options)  # type: ignore[arg-type]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def stop(self) -> bytes:
        self.process.terminate()
        return self.process.communicate(timeout=20)[0]


def wait_for_bundle(client: HubClient, experts: int) -> Bundle:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(HubError):
            fetched = client.bundle(FAMILY)
            if fetched and fetched.bundle.settings["experts"] == experts:
                return fetched.bundle
        time.sleep(0.05)
    raise AssertionError(f"no bundle of {experts} experts")


def test_tls_and_signatures(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    signer = Signer.create(tmp_path / "signing.pem")
    options = ("--certificate", str(certificate), "--certificate-key", str(key))
    options += ("--signing-key", str(tmp_path / "signing.pem"))
    hub = Serving(tmp_path / "hub", *options, scheme="https", ca=certificate)
    try:
        client = hub.client(verify_keys=[read_key(signer.public_key)])
        client.register_family(family_file().to_bytes())
        client.upload_expert(honest(1))
        assert wait_for_bundle(client, 1).family == FAMILY
        impostor = Signer.create(tmp_path / "other.pem").public_key
        with pytest.raises(HubError, match="sign"):
            hub.client(verify_keys=[read_key(impostor)]).bundle(FAMILY)
        with pytest.raises(HubError):
            HubClient(hub.url, hub.token, retries=0).public_key()  # a certificate that nobody vouches for
    finally:
        hub.stop()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """MERGETTA_KILLS=100 for more. What was acknowledged is there; no half blob is served; the database is sound."""
    hub = Serving(tmp_path)
    hub.client().register_family(family_file().to_bytes())
    chance = random.Random(1)
    acknowledged: set[str] = set()
    number = 0
    for _ in range(KILLS):
        timer = threading.Timer(chance.uniform(0.05, 0.6), hub.process.send_signal, (signal.SIGKILL,))
        timer.start()
        client = hub.client(retries=0)
        with contextlib.suppress(HubUnreachable):
            while True:
                expert = honest(number)
                number += 1
                acknowledged.add(client.upload_expert(expert)["id"])
                with contextlib.suppress(HubError):
                    client.bundle(FAMILY)  # verified by the client: a half one would be refused
        timer.join()
        hub.process.communicate()
        with sqlite3.connect(tmp_path / "hub.db") as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
        hub.start()
    assert acknowledged
    settings = HubSettings.in_folder(tmp_path)
    store = Store(settings.database, settings.blobs)
    try:
        stored = {e.id for e in store.experts(FAMILY)}
        assert acknowledged <= stored
        assert all(Expert.from_bytes(store.blob(expert)).family == FAMILY for expert in stored)
        wait_for_bundle(hub.client(), len(stored))
    finally:
        store.close()
        hub.stop()


def test_the_first_start_prints_a_token_once(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("mergetta")), "hub", "serve", "--folder", str(tmp_path)]
    for first in (True, False):
        process = subprocess.Popen([*command, "--port", str(free_port())], stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        process.communicate(timeout=30)
        assert (b"administrator's token" in line) is first


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Postgres, S3]]:
    with postgres(tmp_path) as database, s3() as blobs:
        yield database, blobs


def test_servers_that_go_away_and_come_back(servers: tuple[Postgres, S3]) -> None:
    app = create_app(HubSettings(database=servers[0].url, blobs=servers[1].url, build_every=0.05, probe=False))
    secret, _ = app.state.hub.store.create_token("t", "admin")
    headers = {"Authorization": f"Bearer {secret}"}
    path = f"/v1/families/{FAMILY}/experts"
    with TestClient(app) as client:
        client.put(f"/v1/families/{FAMILY}", content=family_file().to_bytes(), headers=headers)
        for number, server in enumerate(servers):
            server.stop()
            app.state.hub.gate = Gate()
            answer = client.post(path, content=honest(number).to_bytes(), headers=headers)
            assert answer.status_code == 503, answer.text
            assert "not available" in answer.json()["detail"]
            assert client.get("/v1/ready").status_code == 503
            assert client.get("/v1/health").status_code == 200
            server.start()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                answer = client.post(path, content=honest(number).to_bytes(), headers=headers)
                if answer.status_code == 201:
                    break
                time.sleep(0.1)
            assert answer.status_code == 201, answer.text
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            answer = client.get(f"/v1/families/{FAMILY}/bundle", headers=headers)
            if answer.status_code == 200 and Bundle.from_bytes(answer.content).settings["experts"] == 2:
                return
            time.sleep(0.05)
    raise AssertionError("the hub did not recover")


def test_two_hubs_share_postgres_and_s3(servers: tuple[Postgres, S3]) -> None:
    shared = HubSettings(database=servers[0].url, blobs=servers[1].url, build_every=0.05, probe=False)
    first, second = create_app(shared), create_app(shared)
    secret, _ = first.state.hub.store.create_token("t", "admin")
    headers = {"Authorization": f"Bearer {secret}"}
    with TestClient(first) as one, TestClient(second) as two:
        assert one.put(f"/v1/families/{FAMILY}", content=family_file().to_bytes(), headers=headers).status_code == 201
        for seed in range(8):
            client = (one, two)[seed % 2]
            data = honest(seed).to_bytes()
            assert client.post(f"/v1/families/{FAMILY}/experts", content=data, headers=headers).status_code == 201
        deadline = time.monotonic() + 30
        found: list[bytes] = []
        while time.monotonic() < deadline:
            answers = [client.get(f"/v1/families/{FAMILY}/bundle", headers=headers) for client in (one, two)]
            found = [answer.content for answer in answers if answer.status_code == 200]
            if len(found) == 2 and all(Bundle.from_bytes(data).settings["experts"] == 8 for data in found):
                break
            time.sleep(0.05)
        assert len(found) == 2 and found[0] == found[1]
        assert answers[0].headers["etag"].strip('"') == digest_of(found[0])


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(demo, "WEAK", ("gaussian_noise", "snow"))
    monkeypatch.setattr(demo, "STRONG", 1)
    monkeypatch.setattr(demo, "IMAGES", 160)
    news = list(demo.run_demo(tmp_path, 0, seconds=6))
    assert any(isinstance(item, str) and "dashboard: http" in item for item in news)
    picture = news[-1]
    assert isinstance(picture, demo.Picture)
    assert picture.experts >= 1
    for device in picture.devices:
        error = device.error(slice(0, None))
        assert error is not None and error < device.deployed
