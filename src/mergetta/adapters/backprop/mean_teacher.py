"""What CoTTA and RMT share: a teacher, the running mean of the weights that learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.adapters.base import part
from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.groups import GroupValues, Vector, check_groups
from mergetta.losses import Loss
from mergetta.runtimes.torch_runtime import TorchRuntime


class TeacherLoss(Loss):
    """A loss that compares with what the teacher says of the batch."""

    target: Tensor


class MeanTeacher(BackpropAdapter):
    """Asks the teacher first, then lets the student learn from the answer.

    As published, all weights of the student learn; here, as in all of this package, those of the norm layers.
    """

    def __init__(
        self, runtime: TorchRuntime, loss: TeacherLoss, /, teacher_momentum: float = 0.999, **options: Any
    ) -> None:
        if not 0 <= teacher_momentum <= 1:
            raise MergettaError(f"teacher_momentum must lie between 0 and 1, not {teacher_momentum}.")
        self.teacher_momentum = teacher_momentum
        self.teacher_loss = loss
        super().__init__(runtime, loss, **options)

    def reset(self) -> None:
        super().reset()
        self.teacher: dict[str, Vector] = {name: value.copy() for name, value in self.runtime.groups.items()}

    def predict(self, images: Array) -> Array:
        self.teacher_loss.target = self.answer(self.runtime.tensor(images))
        return super().predict(images)

    def answer(self, batch: Tensor) -> Tensor:
        """What the teacher says: logits without gradient."""
        return self.ask(batch, self.teacher)

    def ask(self, batch: Tensor, groups: GroupValues) -> Tensor:
        """An answer given with other weights than the student's."""
        logits: Tensor = self.runtime(batch, groups).logits
        return logits.clone()  # a tensor of inference mode cannot be learnt from

    def after_step(self) -> None:
        share = np.float32(1 - self.teacher_momentum)
        for name, student in self.groups.items():
            self.teacher[name] = self.teacher[name] + share * (student - self.teacher[name])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{f"teacher/{name}": value.copy() for name, value in self.teacher.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        teacher = part(state, "teacher/")
        check_groups(teacher, self.runtime.groups, "The teacher")
        super().load_state_dict(state)
        self.teacher = {name: np.array(teacher[name], dtype=np.float32) for name in self.runtime.groups}
