"""Build sdist and wheel, check what is in them, and install them in environments of their own, on each Python there is.

A full install, from the sdist, makes a model and a bundle: with the first Python, or `--everywhere`, where PyTorch may
bring gigabytes of CUDA. A weak device's, from the wheel, predicts with them on each; its size has a limit. The packages
go to dist/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
FULL = "torch,bench,export,hub"
MOST_MEGABYTES = 220
"""Of what a weak device installs, pip and setuptools not counted."""
FRAMES = "import numpy as np; np.savez('frames.npz', images=np.zeros((100, 28, 28), np.uint8))"
MADE = (
    ("adapt", "fashion:fog@5", "--out", "fog.safetensors", "--batch-size", "1000"),
    ("build", "fog.safetensors", "--out", "bundle.safetensors"),
    ("export", "--out", "model.onnx"),
)
"""By a full install, for the device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--everywhere", action="store_true", help="the full install with each Python, too")
    everywhere = parser.parse_args().everywhere
    pythons = {version: found for version in VERSIONS if (found := interpreter(version))}
    if not pythons:
        sys.exit(f"There is no Python of {', '.join(VERSIONS)}.")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first = next(iter(pythons.values()))
        sdist, wheel = packages(first, place / "build")
        for version, python in pythons.items():
            if python == first or everywhere:
                make_model(install(python, place / "full", f"{sdist}[{FULL}]"), place)
            check_device(install(python, place / "device", str(wheel)), place, version)
            for used in ("full", "device"):
                shutil.rmtree(place / used, ignore_errors=True)
    if missing := [version for version in VERSIONS if version not in pythons]:
        print(f"not tried, because there is no such Python here: {', '.join(missing)}")


def interpreter(version: str) -> str | None:
    """On the path, or among pyenv's."""
    for python in candidates(version):
        told = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True)
        if told.stdout.decode().strip() == version:
            return python
    return None


def candidates(version: str) -> Iterator[str]:
    if found := shutil.which(f"python{version}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def packages(python: str, environment: Path) -> tuple[Path, Path]:
    tools = install(python, environment, "build")
    # the wheel is built from the sdist
    run(tools, "-m", "build", "--outdir", ROOT / "dist", ROOT, stdout=subprocess.DEVNULL)
    sdist, wheel = newest("*.tar.gz"), newest("*.whl")
    check_contents(sdist, wheel)
    return sdist, wheel


def install(python: str, environment: Path, what: str) -> Path:
    """The Python of a new environment that has it."""
    run(python, "-m", "venv", environment)
    inside = environment / "bin" / "python"
    run(inside, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
    return inside


def make_model(python: Path, place: Path) -> None:
    for words in MADE:
        run(python.with_name("mergetta"), *words, cwd=place)


def check_device(python: Path, place: Path, version: str) -> None:
    run(python, "-c", "from mergetta import Bundle, Device, OnnxRuntime, RaceMerge, ZOMerge, build_bundle", cwd=place)
    run(python.with_name("mergetta"), "run", "--help", cwd=place, stdout=subprocess.DEVNULL)
    run(python, "-c", FRAMES, cwd=place)
    given = ("--model", "model.onnx", "--bundle", "bundle.safetensors", "--images", "frames.npz")
    run(python.with_name("mergetta"), "run", *given, cwd=place)
    megabytes = size_of(place / "device")
    print(f"Python {version}: a device's install has {megabytes:.0f} MB")
    if megabytes > MOST_MEGABYTES:
        sys.exit(f"A weak device has room for {MOST_MEGABYTES} MB.")


def run(*command: str | Path, cwd: Path = Path("/"), stdout: int | None = None) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, stdout=stdout)


def newest(pattern: str) -> Path:
    return max((ROOT / "dist").glob(pattern), key=lambda path: path.stat().st_mtime)


def check_contents(sdist: Path, wheel: Path) -> None:
    """All that git has of the package is in both, and nothing else is in the wheel."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name.removeprefix("src/") for name in listed.split()}
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as file:
        source = {name.partition("/")[2] for name in file.getnames()}
    wrong = {f"{wheel.name}: {name}" for name in wanted ^ packed}
    wrong |= {
        f"{sdist.name}: {name}" for name in {f"src/{name}" for name in wanted} | {"LICENSE"} if name not in source
    }
    if wrong:
        sys.exit("Missing, or there and not in git:\n" + "\n".join(sorted(wrong)))
    print(f"{sdist.name}, {wheel.name}: {len(wanted)} files of the package, {wheel.stat().st_size / 1e6:.1f} MB")


def size_of(folder: Path) -> float:
    tools = ("pip", "setuptools")
    return (
        sum(
            path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and not any(part.startswith(tools) for part in path.parts)
        )
        / 1e6
    )


if __name__ == "__main__":
    main()
