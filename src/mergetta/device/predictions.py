"""Where predictions go, one line per image; a file of them is also the record of which images are done."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mergetta.device.stream import Done
from mergetta.errors import MergettaError

COLUMNS = ("index", "name", "content", "label", "class", "confidence", "error")
STANDARD_OUTPUT = Path("-")


class Predictions:
    """JSON lines, or CSV if the name ends in .csv; the path `-` is standard output.

    Nothing is touched before the first row. It is written behind the first `written` bytes, and what stands there is
    cut off.
    """

    def __init__(self, path: Path, written: int = 0) -> None:
        self.path, self.written = path, written
        self._file: BinaryIO | None = None

    def done(self) -> Done:
        """Names and contents of the images that have a row."""
        lines = self._lines() if self.written else iter(())
        try:
            rows: Iterable[Any] = map(json.loads, lines)
            if self.path.suffix == ".csv":
                rows = csv.DictReader(lines)
                if self.written and tuple(rows.fieldnames or ()) != COLUMNS:
                    raise ValueError("The header is another.")
            return {(row["name"], row.get("content", "")) for row in rows}
        except (ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
            raise MergettaError(
                f"{self.path} does not hold what was written to it: delete it to begin anew."
            ) from error
        except OSError as error:
            raise MergettaError(f"Cannot read {self.path}: {error.strerror or error}.") from error

    def _lines(self) -> Iterator[str]:
        left = self.written
        with self.path.open("rb") as file:
            while left > 0 and (line := file.readline()):
                left -= len(line)
                yield line.decode(errors="surrogateescape")

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        text = io.StringIO()
        if self.path.suffix == ".csv":
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            if not self.written:
                writer.writeheader()
            writer.writerows(rows)
        else:
            text.writelines(json.dumps(row) + "\n" for row in rows)
        data = text.getvalue().encode(errors="surrogateescape")
        with self._told():
            self._file = self._file or self._open()
            self._file.write(data)
            self._file.flush()
        self.written += len(data)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        if self._file and self.path != STANDARD_OUTPUT:
            with self._told():
                os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MergettaError(f"Cannot write {self.path}: {error.strerror or error}.") from error

    def _open(self) -> BinaryIO:
        if self.path == STANDARD_OUTPUT:
            return open(1, "wb", closefd=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("r+b" if self.written else "wb")
        file.truncate(self.written)
        file.seek(self.written)
        return file

    def close(self) -> None:
        if self._file:
            with contextlib.suppress(OSError):  # what could not be written has been told
                self._file.close()
