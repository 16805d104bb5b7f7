"""The commands and the code in the documentation run as they stand."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mergetta.device.agent import Summary
from mergetta.device.predictions import COLUMNS
from mergetta.device.state import Progress

from .hub_parts import new_hub
from .test_cli import mergetta

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    lines = [line.split(" #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if re.match(r"mergetta (?!demo|bench(?!.*--samples 100 ))", line)]  # quick ones


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The commands of a page, in a folder that all pages share; what another page has run before is not run again."""
    folder, done = tmp_path_factory.mktemp("docs"), set[str]()
    new_hub(folder / "hub")

    def run_page(page: Path) -> Path:
        for command in commands(page):
            if command not in done:
                result = mergetta(*shlex.split(command)[1:], cwd=folder)
                assert result.returncode == 0, f"{command}: {result.stderr}"
            done.add(command)
        return folder

    return run_page


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if commands(page) and page.name != "README.md" and "results" not in page.parts],
    ids=lambda page: page.name,
)
def test_commands_run(page: Path, run: Callable[[Path], Path]) -> None:
    run(page)


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.py")), ids=lambda script: script.name)
def test_scripts_find_what_they_import(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They measure what the pages say, some of them for hours: here they are only read."""
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="read")


def test_readme_code_runs(run: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, images: np.ndarray) -> None:
    """The five lines, on the bundle that the README's own commands build."""
    monkeypatch.chdir(run(ROOT / "README.md"))
    (block,) = blocks(ROOT / "README.md", "python")
    space = {"stream": [images, images]}
    exec(compile(block, "README.md", "exec"), space)
    assert space["logits"].shape == (len(images), 10)
    assert space["adapter"].status().weights.keys() == {"fog@5", "frost@5", "source model"}


def test_example_method_runs() -> None:
    from mergetta import TorchRuntime, load_family
    from mergetta.data.fashion import load_fashion
    from mergetta.data.streams import as_input

    space: dict = {}
    exec(blocks(ROOT / "docs" / "develop" / "adding-a-method.md", "python")[0], space)
    adapter = space["Halfway"](TorchRuntime(load_family("fashion-bn")))
    assert adapter.predict(as_input(load_fashion()[0][:8])).shape == (8, 10)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|scripts|docs|tests|deploy|examples)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_stand_apart(page: Path) -> None:
    """Without an empty line before it, the site shows a list as a part of the paragraph."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^(?![-#| \d]).+\n- .*", text, re.MULTILINE)


def test_what_a_device_writes_is_described() -> None:
    described = (ROOT / "docs" / "reference" / "formats.md").read_text()
    fields = [field.name for kind in (Summary, Progress) for field in dataclasses.fields(kind)]
    assert not {name for name in (*fields, *COLUMNS) if f"`{name}`" not in described}


def test_no_machine_paths() -> None:
    for page in PAGES:
        assert not re.search(r"(^|[^\w.])/(work|root)/", page.read_text()), page
