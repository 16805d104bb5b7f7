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
REGISTRIES = ("errors.py", "adapters/__init__.py")
"""Files that change no result: messages, and the table of adapters (a key names the adapter that it is about)."""


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
def code_digest(*modules: str) -> str:
    """A digest of the code of these modules (`adapters.base`; a package counts whole) and all that they import.

    Only the package's own code counts, without comments and docstrings.
    """
    waiting = [file for module in modules for file in files_of(PACKAGE / module.replace(".", "/"))]
    seen: dict[Path, str] = {}
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen[file], imported = parsed(file)
            waiting += imported
    digest = hashlib.sha256()
    for file, code in sorted(seen.items()):
        digest.update(f"{file.relative_to(PACKAGE)} {code}".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=512)
def parsed(file: Path) -> tuple[str, list[Path]]:
    """The code of a file, and the files that it imports from the package."""
    tree = ast.parse(file.read_text())
    found = imports(tree)
    return dump(tree), found


def files_of(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(tree: ast.Module) -> list[Path]:
    """The files that a module imports from the package. A name that a package only passes on is followed home."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mergetta."):
            path = PACKAGE / str(node.module).removeprefix("mergetta.").replace(".", "/")
            for alias in node.names:
                home = home_of(path, alias.name)
                if home.relative_to(PACKAGE).as_posix() not in REGISTRIES:
                    found.append(home)
    return found


@lru_cache(maxsize=512)
def home_of(path: Path, name: str) -> Path:
    """The file in which a name imported from the module or package at `path` is defined."""
    if not path.is_dir():
        return path.with_suffix(".py")
    if (path / name).is_dir() or (path / f"{name}.py").is_file():
        return path / name / "__init__.py" if (path / name).is_dir() else path / f"{name}.py"
    for node in ast.parse((path / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return home_of(PACKAGE / str(node.module).removeprefix("mergetta.").replace(".", "/"), name)
    return path / "__init__.py"


def dump(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [s for s in node.body if not is_text(s)] or [ast.Pass()]
    return ast.dump(tree)


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
