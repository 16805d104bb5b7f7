"""Architectures, checkpoints, and how to find one's way in any torch model. Needs torch."""
