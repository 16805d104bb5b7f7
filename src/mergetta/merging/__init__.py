"""Experts → bundle: the server side of the paper (Algorithm 1)."""

from mergetta.merging.build import LOSS_OF, build_bundle

__all__ = ["LOSS_OF", "build_bundle"]
