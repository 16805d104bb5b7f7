"""Results and experts on disk, addressed by everything that went into them: a run resumes, a second one is instant."""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import mergetta
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.files import write_atomically

PACKAGE = Path(mergetta.__file__).parent


def default_cache() -> Path:
    """`$MERGETTA_CACHE`, or the user's cache folder."""
    chosen = os.environ.get("MERGETTA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "mergetta"


def address(facts: Mapping[str, Any]) -> str:
    """A name for a result: the digest of what it depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """A folder of JSON records and expert files. Several processes may write: equal content, atomic renames."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def result(self, key: str) -> dict[str, Any] | None:
        path = self.root / "results" / f"{key}.json"
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def put_result(self, key: str, record: Mapping[str, Any]) -> None:
        write_atomically(self.root / "results" / f"{key}.json", json.dumps(record, indent=1).encode())

    def expert(self, key: str) -> Expert | None:
        try:
            return Expert.load(self.expert_path(key))
        except MergettaError:
            return None

    def put_expert(self, key: str, expert: Expert) -> None:
        expert.save(self.expert_path(key))

    def expert_path(self, key: str) -> Path:
        return self.root / "experts" / f"{key}.safetensors"


@lru_cache(maxsize=64)
def code_digest(*parts: str) -> str:
    """A digest of the code in these files and folders of the package; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for part in parts:
        path = PACKAGE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    node.body = [s for s in node.body if not is_text(s)] or [ast.Pass()]
            digest.update(f"{file.relative_to(PACKAGE)} {ast.dump(tree)}".encode())
    return digest.hexdigest()[:16]


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
