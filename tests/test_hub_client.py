"""The client of the hub: patient and suspicious."""

from __future__ import annotations

import base64
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mergetta import Expert, MergettaError
from mergetta.device import hub_client
from mergetta.device.hub_client import BundleRefused, HubClient, HubError, HubUnreachable, read_key
from mergetta.family_file import FamilyFile

from .numpy_runtime import NumpyRuntime
from .stub_hub import FAMILY, KEY, PUBLIC, StubHub, id_of, make_bundle


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
        assert [status for *_, status in hub.requests] == [503, 429, 502, -1, 200, 200]
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
        hub.announced = "0" * 64
        with pytest.raises(BundleRefused, match="not the one it announced"):
            client.bundle(FAMILY)
        hub.announced = None
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
        client = HubClient(hub.url, verify_keys=[PUBLIC])
        with pytest.raises(BundleRefused, match="is not signed, but"):
            client.bundle(FAMILY)
        hub.signature = base64.b64encode(KEY.sign(b"something else")).decode()
        with pytest.raises(BundleRefused, match="not signed by a key"):
            client.bundle(FAMILY)
        hub.signature = "%%%"
        with pytest.raises(BundleRefused, match="not signed by a key"):
            client.bundle(FAMILY)
        assert HubClient(hub.url).bundle(FAMILY) is not None
        assert hub.bundle is not None
        hub.signature = base64.b64encode(KEY.sign(hub.bundle)).decode()
        assert client.bundle(FAMILY) is not None
        other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
        assert HubClient(hub.url, verify_keys=[other, PUBLIC]).bundle(FAMILY) is not None  # while keys change
        with pytest.raises(BundleRefused, match="not signed by a key"):
            HubClient(hub.url, verify_keys=[other]).bundle(FAMILY)

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

    def test_an_answer_to_another_question_is_refused(self, hub: StubHub) -> None:
        """Signed as it may be: a variant's bundle lacks experts, the whole pool's has some that were to be left out."""
        client = HubClient(hub.url)
        for variant, exclude in (("0123456789abcdef", ()), ("", ("fog",))):
            hub.variant = variant
            with pytest.raises(BundleRefused, match="another question"):
                client.bundle(FAMILY, exclude=exclude)

    def test_signatures_need_cryptography(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
        with pytest.raises(MergettaError, match=r"pip install .*\[signing\]'"):
            HubClient("http://hub", verify_keys=[PUBLIC])
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
