"""Images: the embedded default, corruptions, streams."""
