"""The loop on a weak device: stream → adapter → predictions. Nothing here imports torch."""
