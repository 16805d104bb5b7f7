"""Optimisation with forward passes alone."""
