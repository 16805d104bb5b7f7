"""What the hub does with bad input."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .fleet import EXPERTS, Fleet
from .hub_parts import FAMILY, family_file, honest


def broken_uploads() -> Iterator[bytes]:
    good = honest(0).to_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    yield b"\0"
    yield good[:-1]
    yield good[:20]
    yield struct.pack("<Q", 2**62) + good[8:]  # a header that claims to be enormous
    yield struct.pack("<Q", 10**8) + b"{" * 1000
    yield good[:8] + b"[" * size + good[8 + size :]  # deeply nested
    yield b"PK\x03\x04" + b"\0" * 500
    header = {"__metadata__": {"mergetta": "{}"}, "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    yield struct.pack("<Q", len(text)) + text  # tensors that would fill all memory
    nan = honest(0)
    nan.groups["stem.weight"][0] = np.nan  # type: ignore[index]
    yield nan.to_bytes()


class TestBadInput:
    @pytest.mark.parametrize("data", list(broken_uploads()))
    def test_uploads(self, pool: Fleet, data: bytes) -> None:
        answer = pool.call("POST", EXPERTS, "contribute", content=data)
        assert answer.status_code == 422
        assert answer.json()["detail"].endswith(".")
        assert len(pool.call("GET", EXPERTS).json()) == 6

    @pytest.mark.parametrize("name", ["..", "../x", "..%2f..%2fetc", "%2e%2e", "a/b", "a%00b", "-x", "x" * 201, "a b"])
    def test_names_with_tricks(self, pool: Fleet, name: str, tmp_path: Path) -> None:
        for path in (f"/v1/families/{name}", f"/v1/experts/{name}", f"/v1/blobs/{name}"):
            assert pool.call("GET", path).status_code in (404, 422)
        answer = pool.call("PUT", f"/v1/families/{name}", content=family_file().to_bytes())
        assert answer.status_code in (404, 405, 422)

    def test_a_strange_domain_is_only_text(self, pool: Fleet) -> None:
        strange = "../../<img src=x onerror=alert(1)>[/red]"
        pool.upload(honest(8, strange))
        pool.settle()
        assert strange in pool.states()

    def test_invisible_characters_in_a_domain_are_refused(self, pool: Fleet) -> None:
        content = honest(8, "fog\u202e").to_bytes()
        answer = pool.call("POST", f"/v1/families/{FAMILY}/experts", content=content)
        assert answer.status_code == 422
        assert "invisible characters" in answer.json()["detail"]

    def test_reports(self, pool: Fleet) -> None:
        good = {
            "family": FAMILY, "device": "camera-1", "time": time.time(), "state": "adapting", "batches": 3,
            "images": 192, "entropy": 0.4, "loss": None, "moved": 0.1, "weights": {"fog": 0.7},
        }  # fmt: skip
        later = {**good, "time": good["time"] + 1, "batches": 4, "entropy": None}
        for _ in range(2):  # a device that got no answer sends again
            assert pool.call("POST", "/v1/reports", "consume", json=[good, later]).json() == {"taken": 2}
        found = pool.call("GET", f"/v1/families/{FAMILY}/devices").json()
        assert [(d["device"], d["last"]["batches"]) for d in found] == [("camera-1", 4)]
        history = pool.call("GET", f"/v1/families/{FAMILY}/devices/camera-1/reports").json()
        assert [r["batches"] for r in history] == [3, 4]
        many = {str(i): 0.1 for i in range(300)}
        for change in (
            {"weights": many},
            {"weights": {"fog": "x"}},
            {"images": [[1]]},
            {"image": "x"},
            {"device": "../x"},
            {"entropy": "NaN"},
            {"state": "lost"},
        ):
            answer = pool.call("POST", "/v1/reports", json=[{**good, **change}])
            assert answer.status_code == 422
            assert isinstance(answer.json()["detail"], str)
        assert pool.call("POST", "/v1/reports", json=[{**good, "family": "other"}]).status_code == 404
        assert pool.call("POST", "/v1/reports", content=b"\xff").status_code == 422

    @pytest.mark.parametrize(
        ("path", "allowed"),
        [("/experts", "GET, POST"), ("", "DELETE, GET, PUT"), ("/bundle", "GET"), ("/experts?limit=3", "GET, POST")],
    )
    def test_a_405_says_what_is_allowed(self, pool: Fleet, path: str, allowed: str) -> None:
        answer = pool.call("PATCH", f"/v1/families/{FAMILY}{path}")
        assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)

    @pytest.mark.parametrize(
        "query",
        [
            "limit=%1f5",
            "limit=%205",
            "limit=5.1",
            "limit=1_0",
            "limit=%2B5",
            "limit=%D9%A5",
            "before=%1f1",
            "before=1_0",
        ],
    )
    def test_numbers_in_a_query_are_plain(self, pool: Fleet, query: str) -> None:
        for path in (EXPERTS, "/v1/audit"):
            assert pool.call("GET", f"{path}?{query}").status_code == 422
            assert pool.call("GET", f"{path}?limit=5.0&before=1").status_code == 200

    @pytest.mark.parametrize(
        ("word", "status"), [("true", 202), ("false", 200), ("yes", 422), ("1", 422), ("TRUE", 422)]
    )
    def test_words_in_a_query_are_plain(self, pool: Fleet, word: str, status: int) -> None:
        pool.settle()
        answer = pool.call("GET", f"/v1/families/{FAMILY}/bundle?exclude_own={word}")
        assert answer.status_code == status  # 202: a variant that is built when somebody asks
