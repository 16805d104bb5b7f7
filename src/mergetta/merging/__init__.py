"""Experts → bundle: the server side of the paper (Algorithm 1), and public merging recipes to compare it with."""

from mergetta.merging.build import LOSS_OF, build_bundle
from mergetta.merging.recipes import RECIPE_NAMES, RECIPES, merge_by_recipe

__all__ = ["LOSS_OF", "RECIPES", "RECIPE_NAMES", "build_bundle", "merge_by_recipe"]
