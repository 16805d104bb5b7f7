"""Images of a run for its page: what the domains look like, and what was wrong and became right."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mergetta.bench.inputs import clean_images, family_of, place_of, target_of
from mergetta.bench.suite import Suite
from mergetta.bench.tables import OURS, SOURCE, Record
from mergetta.data.fashion import load_fashion

ROWS = 2
DOZEN = 12
LARGEST = 96
"""Pixels of a picture's side: larger images are made smaller."""


class Shown(NamedTuple):
    """An image, what the source model took it for, and what it is."""

    domain: str
    pixels: NDArray[np.uint8]
    before: int
    label: int


class Outcome(NamedTuple):
    """Predictions of ours compared with the source model's, on the last images of a domain."""

    domain: str
    images: NDArray[np.int64]
    """Their places among the domain's images."""
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def mended(self) -> NDArray[np.bool_]:
        return np.asarray((self.before != self.labels) & (self.after == self.labels))

    @property
    def broken(self) -> NDArray[np.bool_]:
        return np.asarray((self.before == self.labels) & (self.after != self.labels))


def showcase(suite: Suite, domains: Sequence[str], records: Sequence[Record]) -> str:
    """HTML: a strip of domains and, where predictions were kept, a dozen images whose prediction was mended."""
    return strip(suite, domains) + gallery(suite, list(outcomes(suite, domains, records)))


def strip(suite: Suite, domains: Sequence[str]) -> str:
    first = target_of(suite, domains[0])
    few = np.sort(np.unique(first.labels, return_index=True)[1])[:ROWS]  # of different classes
    if suite.data == "fashion":
        clean: NDArray[np.uint8] | None = load_fashion()[0][few]
    else:
        others = clean_images(place_of(suite), ROWS)
        clean = None if others is None else others.images[np.arange(len(others.labels))]
    columns = [] if clean is None else [("clean", clean)]
    columns += [(name, target_of(suite, name).images[few]) for name in domains]
    cells = "".join(
        f"<figure>{''.join(picture(image, name) for image in images)}<figcaption>{worded(name)}</figcaption></figure>"
        for name, images in columns
    )
    return f"<h2>What the model meets</h2><div class=strip>{cells}</div>"


def outcomes(suite: Suite, domains: Sequence[str], records: Sequence[Record]) -> Iterator[Outcome]:
    """Of each domain, for the first seed, in the last pass."""
    last = suite.passes - 1
    found = {(r["domain"], r["method"]): r for r in reversed(records) if r.get("predicted")}
    for domain in domains:
        if (domain, SOURCE) not in found or (domain, OURS) not in found:
            continue
        record, target = found[domain, OURS], target_of(suite, domain, last)
        before, after = (np.array(found[domain, method]["predicted"]) for method in (SOURCE, OURS))
        seen = record["samples"] - last * suite.samples
        images = target.indices(record["seed"], suite.order, last)[: max(seen, 0)][-len(after) :]
        if len(before) == len(after) == len(images):
            yield Outcome(domain, images, before, after, target.labels[images])


def gallery(suite: Suite, found: Sequence[Outcome]) -> str:
    mended, broken = (sum(int(getattr(each, name).sum()) for each in found) for name in ("mended", "broken"))
    if not mended:
        return ""
    classes = family_of(suite).classes
    cards = "".join(
        f"<figure>{picture(shown.pixels, shown.domain)}<figcaption><s>{html.escape(classes[shown.before])}</s>"
        f"<b>{html.escape(classes[shown.label])}</b><small>{worded(shown.domain)}</small></figcaption></figure>"
        for shown in chosen(suite, found)
    )
    return (
        f"<h2>Was wrong, became right</h2><div class=gallery>{cards}</div><p>Struck out: what the model took it for "
        f"without adaptation; below: what it is, and what {OURS} predicted. Of the last "
        f"{sum(len(each.labels) for each in found):,} images of all domains, {mended:,} predictions were wrong and "
        f"became right, {broken:,} were right and became wrong.</p>"
    )


def chosen(suite: Suite, found: Sequence[Outcome]) -> list[Shown]:
    """A dozen, of many domains and classes: domains in turn, of each another image, of the class rarest so far."""
    shown: list[Shown] = []
    taken: set[int] = set()
    left = {each.domain: list(np.flatnonzero(each.mended)) for each in found}
    while len(shown) < DOZEN and any(left.values()):
        for each in found:
            if left[each.domain] and len(shown) < DOZEN:
                seen = Counter(one.label for one in shown)
                place = min(left[each.domain], key=lambda i: (each.images[i] in taken, seen[int(each.labels[i])]))
                left[each.domain].remove(place)
                taken.add(int(each.images[place]))
                (pixels,) = target_of(suite, each.domain, suite.passes - 1).images[each.images[[place]]]
                shown.append(Shown(each.domain, pixels, int(each.before[place]), int(each.labels[place])))
    return shown


def picture(pixels: NDArray[np.uint8], domain: str) -> str:
    """An image element that holds its image."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f'<img alt="{worded(domain)}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def worded(name: str) -> str:
    return html.escape(name.replace("_", " "), quote=True)
