"""The hub against hostile and random input: never a fault (500), never a file outside its store."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import positive_data_acceptance

from mergetta import Expert, MergettaError
from mergetta.hub.app import create_app
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store

from .fleet import BUNDLE, EXPERTS, Fleet
from .hub_parts import FAMILY, family_file, honest

FUZZED = int(os.environ.get("MERGETTA_FUZZ", "2000"))


def mutated(good: bytes, chance: random.Random) -> bytes:
    """Flip, cut, repeat, splice: most of it in the header, where the structure is."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 4)):
        kind, place = chance.randrange(6), chance.randrange(min(len(data), 1200) or 1)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place : place + chance.randrange(1, 64)]
        elif kind == 2:
            data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 16)))
        elif kind == 3:
            data[place:place] = data[: chance.randrange(64)]
        elif kind == 4:
            data[:8] = chance.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1, len(data), len(data) - 8]).to_bytes(
                8, "little"
            )
        else:
            word = chance.choice(
                [b'"F64"', b"-1", b"1e999", b"null", b"NaN", b"[[[[", b'"shape":[2,4]', b"\\u0000", b"BF16"]
            )
            data[place : place + len(word)] = word
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def test_fuzzed_uploads(tmp_path: Path) -> None:
    """Through the same function that the route calls. MERGETTA_FUZZ=10000 for more."""
    folder = tmp_path / "hub"
    chosen = HubSettings.in_folder(folder)
    store = Store(chosen.database, chosen.blobs)
    base = family_file()
    store.put_family(base.to_bytes(), FAMILY)
    chance = random.Random(7)
    good = honest(0).to_bytes()
    refused = 0
    for _ in range(FUZZED):
        data = mutated(good, chance)
        try:
            store.add_expert(FAMILY, data, "t", base)
        except MergettaError:
            refused += 1
    assert refused > FUZZED / 2
    for expert in store.experts(FAMILY):  # what got through is a usable expert
        assert Expert.from_bytes(store.blob(expert.id)).family == FAMILY
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}
    assert {path.name.partition("-")[0] for path in folder.iterdir()} <= {"hub.db", "blobs"}


def test_fuzzed_uploads_over_http(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    chance = random.Random(8)
    with fleet.client:
        fleet.register()
        for _ in range(200):
            data = mutated(honest(1).to_bytes(), chance)
            assert fleet.call("POST", EXPERTS, content=data).status_code in (200, 201, 422)
            assert fleet.call("PUT", f"/v1/families/{FAMILY}", content=data).status_code == 422
        fleet.upload(honest(2))
        fleet.settle()
        assert fleet.call("GET", BUNDLE).status_code == 200


def test_openapi(tmp_path: Path) -> None:
    """schemathesis: valid and invalid requests made from the schema; every answer must be one that the schema names."""
    app = create_app(HubSettings.in_folder(tmp_path))
    secret, _ = app.state.hub.store.create_token("tester", "admin")
    app.state.hub.store.put_family(family_file().to_bytes(), FAMILY)
    app.state.hub.store.add_expert(FAMILY, honest(0).to_bytes(), "t")
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 18
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            cases = operation.as_strategy(generation_mode=mode)
            fits = mode is schemathesis.GenerationMode.POSITIVE
            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong about a request without parameters
                talk(cases, fits, secret)


def talk(cases: st.SearchStrategy[schemathesis.Case], fits: bool, secret: str) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, known=st.booleans())
    def check(case: schemathesis.Case, known: bool) -> None:
        if known and fits and "family" in case.path_parameters:
            case.path_parameters["family"] = FAMILY
        # OpenAPI cannot say which bytes are a file that the hub can use, so it takes all of them for valid
        without = [positive_data_acceptance] if case.media_type == "application/octet-stream" else []
        case.call_and_validate(headers={"Authorization": f"Bearer {secret}"}, excluded_checks=without)

    check()
