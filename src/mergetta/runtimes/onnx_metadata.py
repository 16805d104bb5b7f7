"""What an exported model says about itself: one JSON object under the metadata key `mergetta`."""

from __future__ import annotations

FORMAT, VERSION = "mergetta.device", 2
OUTPUTS = ("logits", "features", "signature", "moments", "groups", "classifier_weight", "classifier_bias")
