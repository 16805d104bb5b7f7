"""DUA (Mirza et al. 2022): BatchNorm moments follow the stream with a momentum that decays towards a floor."""

from __future__ import annotations

from mergetta.adapters.forward_only.adabn import AdaBN
from mergetta.errors import MergettaError
from mergetta.runtimes.base import Runtime


class DUA(AdaBN):
    """Step t = 1, 2, … takes in the moments of its images with momentum · decay^t + floor.

    This is the schedule of the authors' code, in which the floor is added and the first step is decayed already. Two
    things of it are left out. It makes a batch of each single image, 64 random crops, flips and quarter turns, where
    here a step sees the stream's own batch. It also ends after 80 images and is scored by the best of its states on
    the labelled test set, where here every batch is a step and is predicted as it comes.

    References
    ----------
    M. J. Mirza et al., The Norm Must Go On: Dynamic Unsupervised Domain Adaptation by Normalization, CVPR 2022.
    """

    def __init__(self, runtime: Runtime, momentum: float = 0.1, decay: float = 0.94, floor: float = 0.005) -> None:
        if not (0 < decay <= 1 and floor >= 0 and momentum * decay + floor <= 1):
            raise MergettaError(
                f"decay must lie in (0, 1], floor not be negative, and momentum · decay + floor be 1 at most: {decay}, "
                f"{floor}, {momentum}."
            )
        super().__init__(runtime, momentum)
        self.decay, self.floor = decay, floor

    def share(self) -> float:
        return float(self.momentum * self.decay ** (self.batches + 1) + self.floor)
