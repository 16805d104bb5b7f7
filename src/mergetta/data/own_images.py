"""One's own labelled images as the domains of a suite: a folder per domain, or clean images that are corrupted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from mergetta.data.corruptions import CORRUPTIONS
from mergetta.data.images import check_drawn
from mergetta.data.labelled import Files, by_folder
from mergetta.data.lazy import Corrupted, Subset
from mergetta.data.sources import Source, combined, last
from mergetta.data.streams import Domain
from mergetta.errors import MergettaError
from mergetta.seeds import generator


class OwnImages(Source):
    """A domain is the folder of its name, with a folder per class in it. A corruption that has none is drawn over the
    clean images: those in the folder `clean` or, without one, in the classes' folders themselves.
    """

    sorted_by_class = True

    def __init__(self, folder: Path | None, channels: int, size: int | None, classes: Sequence[str]) -> None:
        if folder is None or not folder.is_dir():
            raise MergettaError(f"There is no folder {folder or ''} of images: name it as `folder` or with --data.")
        if size is None:
            raise MergettaError("The family does not say how large its images are: give it a size.")
        self.folder, self.channels, self.size, self.classes = folder, channels, size, classes
        self.description = f"one's own images in {folder.name}"

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """Of names, sizes and times: the content of many thousand files would take long to read."""
        files = ((path, path.stat()) for path in sorted(self.folder.rglob("*")) if path.is_file())
        facts = [f"{path.relative_to(self.folder)} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files]
        return combined([str(self.size), *self.classes, *facts])

    @cached_property
    def originals(self) -> Domain:
        """All clean images."""
        own = self.folder / "clean"
        return self.labelled("clean", own if own.is_dir() else self.folder)

    def labelled(self, name: str, folder: Path) -> Domain:
        files, labels = by_folder(folder, self.classes)
        return Domain(name, Files(files, self.channels, self.size), labels)

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        """Folders have no severity."""
        if (self.folder / domain).is_dir():
            check_drawn(draw, self.folder / domain)
            return self.labelled(domain, self.folder / domain)
        check_domain(self.folder, domain)
        return Domain(domain, Corrupted(self.originals.images, domain, severity, draw), self.originals.labels)

    def clean(self, count: int) -> Domain | None:
        try:
            clean = self.originals
        except MergettaError:  # only folders of other domains
            return None
        order = generator(0, 0, "subset").permutation(len(clean.labels))
        return last(Domain("clean", Subset(clean.images, order), clean.labels[order]), count)


def check_domain(folder: Path, domain: str) -> None:
    if domain not in CORRUPTIONS and not (folder / domain).is_dir():
        raise MergettaError(f"{folder} has no folder {domain!r}, and there is no corruption of that name.")
