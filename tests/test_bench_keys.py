"""A cache that resumes and forgets nothing: keys depend on all that matters, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergetta.bench import protocol
from mergetta.bench.cells import Cell
from mergetta.bench.keys import cell_key, expert_key
from mergetta.bench.pools import make_expert
from mergetta.bench.protocol import run_cell, stored
from mergetta.bench.store import Store, address, code_digest, home_of, parsed

from .suites import THREE, small


def test_records_are_cached_and_results_do_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, store = small(), Store(tmp_path)
    cell = Cell("zo-merge", "roid", "fog", 0)
    first = run_cell(suite, cell, store)
    monkeypatch.setattr(protocol, "online", lambda *_: pytest.fail("measured again"))
    assert run_cell(suite, cell, store) == first
    monkeypatch.undo()
    again = run_cell(suite, cell, Store(tmp_path / "other"))
    assert again["wrong"] == first["wrong"]  # the same numbers from an empty cache


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    suite, store = small(), Store(tmp_path)
    cell = Cell("merge", "roid", "fog", 0)
    first = run_cell(suite, cell, store)
    (tmp_path / "results" / f"{cell_key(suite, cell)}.json").write_text("{")
    store.expert_path(expert_key(suite, "roid", "contrast", 0)).write_bytes(b"cut")
    assert run_cell(suite, cell, store)["wrong"] == first["wrong"]


def test_keys_depend_on_everything_that_matters() -> None:
    suite = small()
    cell = Cell("zo-merge", "roid", "fog", 0)
    changed = [
        cell_key(suite, cell),
        cell_key(suite, Cell("zo-merge", "roid", "fog", 1)),
        cell_key(suite, Cell("zo-merge", "deyo", "fog", 0)),
        cell_key(suite, Cell("zo-merge", "roid", "contrast", 0)),
        cell_key(suite, Cell("merge", "roid", "fog", 0)),
        cell_key(suite.restricted(severity=4), cell),
        cell_key(suite.restricted(samples=40), cell),
        cell_key(suite.model_copy(update={"batch_size": 10}), cell),
        cell_key(suite.model_copy(update={"domains": THREE[:2]}), cell),
        cell_key(small(name="fashion-vit"), cell),
    ]
    assert len(set(changed)) == len(changed)
    assert address({"a": 1, "b": 2}) == address({"b": 2, "a": 1})


def forget() -> None:
    for cached in (code_digest, home_of, parsed):
        cached.cache_clear()


def test_code_digest_ignores_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergetta.bench.store.PACKAGE", tmp_path)

    def digest(text: str) -> str:
        (tmp_path / "m.py").write_text(text)
        forget()
        return code_digest("m")

    plain = digest("def f():\n    return 1\n")
    assert digest('"""Doc."""\n\ndef f():\n    """Doc."""\n    # why\n    return 1\n') == plain
    assert digest("def f():\n    return 2\n") != plain
    forget()


def test_code_digest_follows_imports_and_not_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergetta.bench.store.PACKAGE", tmp_path)
    files = {
        "m.py": "from mergetta.package import f\nfrom mergetta.adapters import create_adapter\n",
        "package/__init__.py": "from mergetta.package.home import f\nfrom mergetta.package.other import g\n",
        "package/home.py": "f = 1\n",
        "package/other.py": "g = 1\n",
        "adapters/__init__.py": "create_adapter = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest(name: str = "", text: str = "") -> str:
        if name:
            (tmp_path / name).write_text(text)
        forget()
        return code_digest("m")

    before = digest()
    assert digest("package/other.py", "g = 2\n") == before
    assert digest("adapters/__init__.py", "create_adapter = 2\n") == before
    assert digest("package/home.py", "f = 2\n") != before
    forget()


def test_making_an_expert_measures_its_method_on_the_way(tmp_path: Path) -> None:
    suite, store = small("roid", "tent"), Store(tmp_path)
    cell = Cell("roid", None, THREE[0], 1)
    assert stored(suite, cell, store) is None
    expert = make_expert(suite, "roid", THREE[0], 1, store)
    on_the_way = stored(suite, cell, store)
    alone = run_cell(suite, cell, Store(tmp_path / "other"))
    assert on_the_way is not None
    assert {**on_the_way, "seconds": 0} == {**alone, "seconds": 0}
    other = suite.restricted(methods=["tent"])
    again = make_expert(other, "roid", THREE[0], 1, Store(tmp_path / "third"))
    assert again.groups.keys() == expert.groups.keys()
    assert all(np.array_equal(again.groups[name], expert.groups[name]) for name in expert.groups)
    assert np.array_equal(again.signature, expert.signature)
