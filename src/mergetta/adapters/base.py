"""What an adapter is: a test-time-adaptation method that predicts a stream batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergetta.arrays import Array
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import check_base, check_groups
from mergetta.runtimes.base import Output, Runtime

ADAPTING, SETTLED = "adapting", "settled"


@dataclass(frozen=True)
class Status:
    """How an adapter is doing, for people, reports and tests."""

    phase: str = ADAPTING
    """`settled` when there is nothing left to try."""
    steps: int = 0
    """Zeroth-order steps that were taken, or candidates that were tried."""
    shifts: int = 0
    """How often the domain was found to have changed."""
    fallbacks: int = 0
    """How often it went back to where it started, or to the source model."""
    normalises: str = ""
    """What BatchNorm normalises with."""
    runs: float | None = None
    """How likely classes come in runs, where that is asked (`wrappers/filtered.py`)."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of each member of the bundle, and of the source model."""
    loss: float | None = None
    """In the last step."""
    moved: float | None = None
    """How far the coefficients are from where they started."""


class Adapter(ABC):
    """Predict, adapt, remember. `state_dict` holds NumPy arrays and plain numbers, so any format can keep it."""

    _features: Array | None = None

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def features(self) -> Array | None:
        """The classifier's input in the last prediction, where a method shows it: what a wrapper may learn from."""
        return self._features

    def _shown(self, output: Output) -> Array:
        """Logits to return, with the features that belong to them."""
        self._features = output.features
        return output.logits

    @abstractmethod
    def predict(self, images: Array) -> Array:
        """Logits of a batch; adapts before, while or after it predicts, as the method has it."""

    def look(self, images: Array) -> Array:
        """Logits of more images, such as another view of the batch, without any adaptation to them."""
        state = self.state_dict()
        try:
            return self.predict(images)
        finally:
            self.load_state_dict(state)

    def swap(self, bundle: Bundle) -> bool:
        """Go on with another bundle, if the method works on one; whether anything has changed."""
        raise MergettaError("This method works on no bundle, and cannot take another one.")

    def reset(self) -> None:
        """Back to the state of a new adapter."""

    def status(self) -> Status:
        """How it is doing."""
        return Status()

    @property
    def changes(self) -> int:
        """How often the domain was found to have changed; wrappers ask before and after every batch."""
        return self.status().shifts

    def state_dict(self) -> dict[str, Any]:
        """All that the stream has changed; `load_state_dict` continues from it exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; a state that does not fit changes nothing."""


class Wrapper(Adapter):
    """An adapter around an adapter. What the wrapper itself knows of a domain is `clear`ed when that changes."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.runtime)
        self.adapter = adapter

    @abstractmethod
    def clear(self) -> None:
        """Nothing is known of the domain."""

    def reset(self) -> None:
        self.adapter.reset()
        self.clear()

    def _predict(self, images: Array) -> Array:
        """What the adapter predicts; in a new domain, nothing is known."""
        changes = self.adapter.changes
        logits = self.adapter.predict(images)
        if self.adapter.changes != changes:
            self.clear()
        return logits

    def look(self, images: Array) -> Array:
        return self.adapter.look(images)

    @property
    def features(self) -> Array | None:
        return self.adapter.features

    @property
    def changes(self) -> int:
        return self.adapter.changes

    def swap(self, bundle: Bundle) -> bool:
        return self.adapter.swap(bundle)

    def state_dict(self) -> dict[str, Any]:
        return {f"adapter/{name}": value for name, value in self.adapter.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.load_state_dict(part(state, "adapter/"))


def entry(state: Mapping[str, Any], name: str) -> Any:
    """state[name], or one sentence."""
    if name not in state:
        raise MergettaError(f"This state does not fit the adapter: it has no {name!r}.")
    return state[name]


def part(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def check_family(runtime: Runtime, family: str, what: str) -> None:
    if runtime.family and family and runtime.family != family:
        raise MergettaError(f"{what} belongs to the family {family!r}, but the model is {runtime.family!r}.")


def check_bundle(runtime: Runtime, bundle: Bundle) -> None:
    """Raise unless it is of the model's family and starts from the model's own groups."""
    check_family(runtime, bundle.family, "The bundle")
    check_base(bundle.base, runtime.groups, "The bundle")


def check_pool(runtime: Runtime, experts: Sequence[Expert], method: str) -> None:
    """Raise unless there are experts, all of the model's family and with its groups."""
    if not experts:
        raise MergettaError(f"{method} needs at least one expert.")
    for expert in experts:
        check_family(runtime, expert.family, f"The expert {expert.domain!r}")
        check_groups(expert.groups, runtime.groups, f"The expert {expert.domain!r}")
