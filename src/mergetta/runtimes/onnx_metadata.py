"""What an exported model says about itself: one JSON object under the metadata key `mergetta`."""

from __future__ import annotations

from pathlib import Path

FORMAT, VERSION = "mergetta.device", 2
OUTPUTS = ("logits", "features", "signature", "moments", "groups", "classifier_weight", "classifier_bias")

PLAIN_OUTPUTS = OUTPUTS[:3]
PLAIN_FORMAT = "mergetta.plain"
"""Of the graph whose groups are constants. It has a `digest`, which the adjustable model repeats as `plain`: so the two
are known to belong together."""


def plain_path(model: str | Path) -> Path:
    """Where the plain graph of a model stands: beside it.

    >>> plain_path("device/model.onnx").name
    'model.plain.onnx'
    """
    return Path(model).with_suffix(".plain.onnx")
