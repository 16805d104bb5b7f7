"""The cells of a table: what is measured, and which experts a cell may use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mergetta.bench.suite import Suite
from mergetta.errors import MergettaError
from mergetta.seeds import generator

DEVICES = 4
"""Experts of one domain that a large pool may have, each made by a device of its own."""


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    method: str
    expert: str | None
    """How the experts were made; None for a method that uses none."""
    domain: str
    seed: int
    before: tuple[str, ...] | None = None
    """In a continual run, the domains that the adapter has met when it comes to this one; None: it starts anew."""

    def visits(self) -> list[Cell]:
        """The cells that are measured one after the other with one adapter, down to this one."""
        if self.before is None:
            return [self]
        sequence = (*self.before, self.domain)
        return [dataclasses.replace(self, domain=d, before=sequence[:i]) for i, d in enumerate(sequence)]


def members(suite: Suite, cell: Cell) -> list[tuple[str, int]]:
    """The experts that a cell may use, by the domain and the seed that they are made with: all but those of the
    target's fold, which by default is the target alone.

    They are the same for all visits of a continual run.
    """
    first = cell.visits()[0].domain
    others = [domain for domain in suite.domains if domain not in suite.fold_of(first)]
    if not others:
        raise MergettaError(
            f"{cell.method} needs experts, and in one fold there are no other domains to make them from: choose more "
            "folds, or methods without experts."
        )
    wanted = suite.methods[cell.method].pool
    if wanted is None:
        return [(domain, cell.seed) for domain in others]
    order = generator(cell.seed, 0, f"pool/{first}").permutation(len(others))
    round_, own = divmod(cell.seed, DEVICES)
    seeds = [DEVICES * round_ + (own + device) % DEVICES for device in range(DEVICES)]
    found = [(others[index], seed) for seed in seeds for index in order]
    if wanted > len(found):
        raise MergettaError(f"The suite {suite.name} has {len(found)} experts for {cell.domain}, not {wanted}.")
    return found[:wanted]


def same_run(suite: Suite, expert: str, domain: str, seed: int) -> Cell | None:
    """The cell whose method does exactly what makes the expert: same images in the same stream, same options."""
    same_images = suite.first is None and suite.expert_samples is None
    same_stream = suite.order == "mixed" and suite.passes == 1 and suite.batch_size == suite.training_batch_size
    if same_images and same_stream:
        for name, settings in suite.methods.items():
            plain = not (settings.mirror or settings.runs or settings.head)
            if plain and (settings.adapter, settings.options) == (expert, suite.experts[expert]):
                return Cell(name, None, domain, seed)
    return None
