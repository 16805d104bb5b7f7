"""Experts → bundle: the server side of the paper (Algorithm 1)."""

from mergetta.merging.build import build_bundle

__all__ = ["build_bundle"]
