"""A hook of MkDocs: what the site has beside `docs/`, and the command line's reference, from the commands themselves.

Links in the pages are those of the repository; here they become those of the site.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from mergetta.cli import app

ROOT = Path(__file__).parents[1]
LINKED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "compose.yaml", "deploy", "examples")
"""What is a page, or can be downloaded, though it is not in `docs/`."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    listed = subprocess.run(["git", "ls-files", *LINKED], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in listed.split():
        files.append(File.generated(config, place_of(path), content=(ROOT / path).read_bytes()))
    return files


def place_of(path: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page's links lead to where the site has the same files."""
    here = page.file.src_uri
    folder = posixpath.dirname(f"docs/{here}" if (ROOT / "docs" / here).is_file() else "")

    def moved(link: re.Match[str]) -> str:
        target = place_of(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({posixpath.relpath(target, posixpath.dirname(here))}"

    markdown = re.sub(r"\]\((?!\w+:|#)([^)#]+)", moved, markdown)
    return f"{markdown}\n{command_line()}" if here == "reference/command-line.md" else markdown


def command_line() -> str:
    command = typer.main.get_command(app)
    with typer.Context(command, info_name="mergetta") as context:
        return get_docs_for_click(obj=command, ctx=context, name="mergetta").partition("\n")[2]
