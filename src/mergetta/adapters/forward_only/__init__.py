"""Methods that need forward passes alone. Nothing here imports torch."""
