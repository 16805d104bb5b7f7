"""Which images of a domain a device looks at closely: all at first, and then fewer and fewer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Of the first images all, and of every doubling from there the first part.

    What is known then moves slowly, and to look is what costs: a graph that shows the moments of its layers cannot have
    norm layers folded away. Images in a row are looked at, so that a device changes from one graph to the other seldom.
    """

    first: int = 128
    """As many as a prior counts for at most (`MomentSettings.most`)."""
    share: float = 1 / 8
    """Of each doubling."""
    independent: float = 16.0
    """Images that they must be worth (`classes.independent_images`), or more are looked at: the prior may be wrong."""

    def stretch(self, images: float, worth: float) -> tuple[bool, int]:
        """Whether the next image is looked at, after so many, and for how many images in a row that holds.

        >>> [Sampling().stretch(images, worth=100.0) for images in (0, 128, 144, 300)]
        [(True, 128), (True, 16), (False, 112), (False, 212)]
        >>> Sampling().stretch(300, worth=10.0)
        (True, 6)
        """
        if images < self.first:
            return True, max(1, round(self.first - images))
        start = float(self.first)
        while 2 * start <= images:
            start *= 2
        left = (1 + self.share) * start - images
        if left > 0:
            return True, max(1, round(left))
        if worth < self.independent:
            return True, max(1, round(self.independent - worth))
        return False, max(1, round(2 * start - images))
