"""Ways to run a model with given groups."""
