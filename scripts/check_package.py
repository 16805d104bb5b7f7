"""Build sdist and wheel, check what is in them, and install the wheel in an environment of its own.

`python scripts/check_package.py` installs for a weak device, whose size has a limit; `--extras torch,bench` for more.
The packages go to dist/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_MEGABYTES = 220
"""Of what a weak device installs, pip and setuptools not counted."""
TRIED = "from mergetta import Device, load_family; load_family('fashion-bn')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="separated by commas")
    extras = parser.parse_args().extras
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "build")
        run(python, "-m", "pip", "install", "--quiet", "build")
        run(python, "-m", "build", "--outdir", ROOT / "dist", ROOT)  # the wheel is built from the sdist
        sdist, wheel = newest("*.tar.gz"), newest("*.whl")
        check_contents(sdist, wheel)
        python = environment(Path(folder) / "device")
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
            f"{wheel}[{extras}]" if extras else wheel,
        )
        run(python.with_name("mergetta"), "--version")
        run(python.with_name("mergetta"), "run", "--help", stdout=subprocess.DEVNULL)
        if "torch" in extras.split(","):
            run(python, "-c", TRIED)
        megabytes = size_of(Path(folder) / "device")
        print(f"installed: {megabytes:.0f} MB")
        if not extras and megabytes > MOST_MEGABYTES:
            sys.exit(f"A weak device has room for {MOST_MEGABYTES} MB.")


def environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*command: str | Path, stdout: int | None = None) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd="/", stdout=stdout)


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
