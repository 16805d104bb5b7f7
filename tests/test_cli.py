"""The command line as a person uses it: it works, says what it did, and on bad input exits with 2 and one sentence."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer.main

from mergetta import Bundle, Expert, __version__, errors
from mergetta.cli import app, main
from mergetta.files import encode


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def mergetta(*arguments: object, cwd: Path | None = None, columns: int = 200) -> Result:
    """Run the command in this process, as the installed script would."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["mergetta", *map(str, arguments)])
        patch.setenv("COLUMNS", str(columns))
        if cwd:
            patch.chdir(cwd)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def test_the_installed_script() -> None:
    script = Path(sys.executable).with_name("mergetta")
    result = subprocess.run([script, "inspect", "nothing"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "There is no family or checkpoint file 'nothing'" in " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("experts")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 40, 28, 28), dtype=np.uint8)
    paths = []
    for i, images in enumerate(pixels):
        np.savez(folder / f"site{i}.npz", images=images)
        paths.append(folder / f"site{i}.safetensors")
        result = mergetta("adapt", folder / f"site{i}.npz", "--out", paths[-1], "--batch-size", 20)
        assert result.returncode == 0, result.stderr
    return paths


def test_from_images_to_bundle(experts: list[Path], tmp_path: Path) -> None:
    expert = Expert.load(experts[0])
    assert expert.domain == "site0"
    assert expert.provenance["samples"] == 36  # a tenth is held back
    out = tmp_path / "bundle.safetensors"
    result = mergetta("build", *experts, "--out", out, "--max-rank", 2)
    assert result.returncode == 0, result.stderr
    bundle = Bundle.load(out, family=expert.family)
    assert max(len(basis) for basis in bundle.basis.values()) <= 2
    assert f"2 experts in {bundle.dimension} coefficients" in result.stdout
    shown = json.loads(mergetta("inspect", out, "--json").stdout)
    assert shown["dimension"] == bundle.dimension
    assert shown["members"] == [{"member": f"site{i}", "experts": 1, "contributors": 1} for i in range(2)]
    assert "contributors" in mergetta("inspect", out).stdout
    assert mergetta("inspect", experts[0]).returncode == 0


@pytest.mark.parametrize(("most", "found"), [(1, ["site0 and others"]), (0, [])])
def test_fewer_members(experts: list[Path], tmp_path: Path, most: int, found: list[str]) -> None:
    out = tmp_path / "bundle.safetensors"
    assert mergetta("build", *experts, "--out", out, "--members", most).returncode == 0
    shown = json.loads(mergetta("inspect", out, "--json").stdout)
    assert [each["member"] for each in shown["members"]] == found
    assert ("contributors" in mergetta("inspect", out).stdout) == bool(found)


def test_embedded_images_by_name(tmp_path: Path) -> None:
    result = mergetta("adapt", "fashion:fog@3", "--out", tmp_path / "fog.safetensors", "--batch-size", 2000)
    assert result.returncode == 0, result.stderr
    assert Expert.load(tmp_path / "fog.safetensors").domain == "fog@3"


def test_inspect_shows_groups_and_blocks() -> None:
    shown = json.loads(mergetta("inspect", "fashion-vit", "--json").stdout)
    assert shown["groups"][-1] == {
        "group": "norm.bias", "size": 64, "block": 6, "kind": "shift", "frozen by default": True,
    }  # fmt: skip


def test_bench_writes_table_json_and_page(tmp_path: Path) -> None:
    result = mergetta(
        "bench", "fashion-bn", "--methods", "source,bn-stats", "--domains", "fog,snow", "--seeds", 2, "--samples", 40,
        "--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--cache", tmp_path / "cache", "--jobs", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "average" in result.stdout
    assert "±" in result.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())["results"]) == 8
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert "[bold" not in result.stdout


def test_demo_in_small(tmp_path: Path) -> None:
    result = mergetta(
        "demo",
        "--methods",
        "source",
        "--domains",
        "fog",
        "--samples",
        20,
        "--json",
        "d.json",
        "--jobs",
        1,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "mergetta-demo.html").exists()
    assert json.loads((tmp_path / "d.json").read_text())["suite"] == "fashion-bn"


def every_command(group: Any, name: str) -> Iterator[str]:
    for verb, command in group.commands.items():
        yield from every_command(command, f"{name} {verb}") if hasattr(command, "commands") else [f"{name} {verb}"]


@pytest.mark.parametrize("command", list(every_command(typer.main.get_group(app), "mergetta")))
def test_help_has_an_example(command: str) -> None:
    result = mergetta(*command.split()[1:], "--help")
    assert result.returncode == 0
    assert f"Example: {command}" in " ".join(result.stdout.split())


def test_version_and_completion() -> None:
    assert mergetta("--version").stdout == f"mergetta {__version__}\n"
    assert version("mergetta") == __version__
    assert "--show-completion" in mergetta("--help").stdout


def test_verbose_says_where_an_error_comes_from() -> None:
    assert "files.py" not in mergetta("build", "none", "--out", "o").stderr
    result = mergetta("--verbose", "build", "none", "--out", "o")
    assert result.returncode == 2
    assert "files.py" in result.stderr and result.stderr.endswith(
        "error: Cannot read none: No such file or directory.\n"
    )


@pytest.mark.parametrize(
    ("clone", "command"),
    [(True, "pip install -c {0}/constraints.txt -e '{0}[hub]'"), (False, "pip install 'mergetta[hub]'")],
)
def test_what_is_missing_can_be_installed(
    clone: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "installed_from", lambda: None)
    (tmp_path / "src" / "mergetta").mkdir(parents=True)
    if clone:
        (tmp_path / "constraints.txt").touch()
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "src" / "mergetta" / "errors.py"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = mergetta("hub", "serve", "--port", 0, cwd=tmp_path)
    assert result.returncode == 2
    assert command.format(tmp_path) in result.stderr


@pytest.mark.parametrize(
    ("verb", "extras"),
    [("demo", "torch,bench"), ("bench fashion-bn", "torch,bench"), ("export --out m", "torch,export")],
)
def test_one_command_installs_all_that_a_verb_lacks(verb: str, extras: str) -> None:
    """In a process of its own, without PyTorch."""
    code = f"import sys; sys.modules['torch'] = None; sys.argv = 'mergetta {verb}'.split()\n"
    code += "from mergetta.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "This command needs torch: pip install" in result.stderr and f"[{extras}]" in result.stderr


@pytest.mark.parametrize(
    ("told", "command"),
    [
        ('{{"url": "file://{0}", "dir_info": {{}}}}', "pip install -c {0}/constraints.txt '{0}[hub]'"),
        ('{{"url": "file://{0}/m.whl", "archive_info": {{}}}}', "pip install '{0}/m.whl[hub]'"),
        ('{{"url": "file://{0}/gone.whl", "archive_info": {{}}}}', "pip install 'mergetta[hub]'"),
        ('{{"url": "https://e.org/m.whl", "archive_info": {{}}}}', "pip install 'mergetta[hub]'"),
        ("", "pip install 'mergetta[hub]'"),
    ],
)
def test_extras_come_from_where_mergetta_came_from(
    told: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An install that is not editable, from a clone or of a wheel: there is no mergetta in an index."""
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "m.whl").touch()
    facts = tmp_path / "site" / "mergetta-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "direct_url.json").write_text(told.format(tmp_path))
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site" / "python" / "mergetta" / "errors.py"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Distribution.at(facts))
    assert errors.how_to_install("hub") == command.format(tmp_path)


class TestBadInput:
    """Each: exit code 2, one sentence on stderr, no traceback, nothing overwritten."""

    def check(self, sentence: str, *arguments: object) -> None:
        result = mergetta(*arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert sentence in " ".join(result.stderr.split()), result.stderr

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        path = tmp_path / "out.safetensors"
        path.write_bytes(b"precious")
        return path

    @pytest.fixture(autouse=True)
    def nothing_overwritten(self, out: Path):  # type: ignore[no-untyped-def]
        yield
        assert out.read_bytes() == b"precious"
        assert len(list(out.parent.glob(".out*"))) == 0

    def test_wrong_family(self, experts: list[Path], out: Path) -> None:
        self.check("belongs to the family", "build", *experts, "--out", out, "--family", "fashion-vit")

    def test_missing_group(self, experts: list[Path], out: Path, tmp_path: Path) -> None:
        expert = Expert.load(experts[0])
        groups = dict(expert.groups)
        del groups["bn.weight"]
        Expert(groups, expert.family).save(tmp_path / "e.safetensors")
        self.check("name it with --family", "build", tmp_path / "e.safetensors", "--out", out)
        self.check("lacks the group 'bn.weight'", "build", tmp_path / "e.safetensors", experts[0], "--out", out)

    def test_truncated(self, experts: list[Path], out: Path, tmp_path: Path) -> None:
        (tmp_path / "cut.safetensors").write_bytes(experts[0].read_bytes()[:-10])
        self.check("truncated", "build", tmp_path / "cut.safetensors", "--out", out)

    def test_no_share_and_no_rank(self, experts: list[Path], out: Path) -> None:
        self.check("keep must be a share", "build", *experts, "--out", out, "--keep", 0)
        self.check("max_rank must be at least 1", "build", *experts, "--out", out, "--max-rank", 0)
        self.check("Cannot freeze the last 9 blocks", "build", *experts, "--out", out, "--frozen-blocks", 9)

    def test_no_experts(self, out: Path) -> None:
        self.check("Missing argument", "build", "--out", out)
        self.check("leave out the checkpoint", "build", out, "--checkpoint", out, "--out", out)

    def test_images(self, out: Path, tmp_path: Path) -> None:
        np.savez(tmp_path / "f.npz", images=np.zeros((2, 28, 28)))
        self.check("must hold uint8 images", "adapt", tmp_path / "f.npz", "--out", out)
        np.savez(tmp_path / "c.npz", x=np.zeros((2, 28, 28, 3), np.uint8))
        self.check("images of 3 channels, but the model takes 1", "adapt", tmp_path / "c.npz", "--out", out)
        np.savez(tmp_path / "o.npz", x=np.array([None]), allow_pickle=True)
        self.check("Cannot read", "adapt", tmp_path / "o.npz", "--out", out)
        (tmp_path / "x.png").write_bytes(b"no image")
        self.check("can be read. Cannot read the image", "adapt", tmp_path, "--out", out)

    def test_not_finite_and_from_the_future(self, experts: list[Path], out: Path, tmp_path: Path) -> None:
        path = tmp_path / "e.safetensors"
        groups = {f"group/{name}": np.full_like(v, np.nan) for name, v in Expert.load(experts[0]).groups.items()}
        header = {"family": Expert.load(experts[0]).family, "domain": "", "provenance": {}}
        path.write_bytes(encode(groups, "mergetta.expert", 3, header))
        self.check("NaN or infinite", "build", path, "--out", out)
        path.write_bytes(encode(groups, "mergetta.expert", 4, header))
        self.check("upgrade mergetta", "build", path, "--out", out)
        path.write_bytes(encode(groups, "mergetta.expert", 1, header))
        self.check("make it anew with `mergetta adapt`", "build", path, "--out", out)

    def test_markup_is_not_interpreted(self, out: Path, tmp_path: Path) -> None:
        self.check("no file [/bold]", "inspect", "[/bold]")
        Expert({"a": np.zeros(2)}, domain="[/x]", provenance={"format": "evil"}).save(tmp_path / "e")
        result = mergetta("inspect", tmp_path / "e")
        assert result.returncode == 0
        assert "domain: [/x]" in result.stdout
        assert "format: mergetta.expert" in result.stdout

    def test_export(self, out: Path) -> None:
        self.check("give some with --calibration", "export", "--int8", "static", "--out", out)
        self.check("There is no family", "export", "--family", "x", "--out", out)

    def test_names(self, out: Path) -> None:
        self.check("no method 'magic'", "bench", "fashion-bn", "--methods", "magic")
        self.check("forward-only", "adapt", "fashion:fog", "--out", out, "--method", "t3a")
        self.check("no experts by 'sgd'", "bench", "fashion-bn", "--experts", "sgd", "--samples", 20)
