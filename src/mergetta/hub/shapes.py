"""What goes over the wire as JSON, in both directions; FastAPI documents and checks it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

NAME = r"^[A-Za-z0-9][A-Za-z0-9._@:+-]{0,199}$"
"""Families and devices: nothing that a path or a shell could take for something else."""
DIGEST = r"^[0-9a-f]{64}$"
PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Text without control characters."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


def at_most(most: int) -> BeforeValidator:
    """Looks at the number before the items: a million wrong ones are one mistake, not a million to be listed."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"at most {most} are taken, not {len(value)}")
        return value

    return BeforeValidator(check)


class Given(BaseModel):
    """What comes from outside: known fields only, and no time is spent on many unknown ones."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def check_number(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            raise ValueError("there are more fields than are known")
        return value


class Problem(BaseModel):
    """Every error: one sentence on what is wrong and what to do."""

    detail: str


class FamilyShape(BaseModel):
    id: str
    note: str
    preprocessing: dict[str, Any]
    groups: int
    parameters: int
    created: float
    experts: dict[str, int]
    bundle: str | None
    lacks_probes: bool
    """Its experts wait until there are images to try them on: `mergetta hub probe`."""
    up_to_date: bool
    waiting_since: float | None
    """When the first expert came, or changed, that no bundle has taken in yet; long ago if builds fail."""


class ExpertShape(BaseModel):
    id: str
    family: str
    domain: str
    method: str
    samples: int | None
    size: int
    norm: float | None
    """Told to administrators only."""
    state: Literal["pending", "active", "quarantined", "retired"]
    reason: str
    waits: bool
    """For an administrator to approve the token that uploaded it."""
    decided: bool
    token: str
    """Who uploaded it: the id of a token, as `mergetta hub token list` shows it; empty for others' unless to
    administrators."""
    uploader: str
    """The name of that token; empty for all but administrators."""
    created: float
    changed: float


class Decision(Given):
    """A person's word on an expert."""

    state: Literal["active", "quarantined", "retired"]
    reason: Annotated[str, Field(max_length=500, pattern=PLAIN)] = ""


class BundleShape(BaseModel):
    id: str
    family: str
    generation: int
    signature: str | None
    size: int
    experts: int
    dimension: int
    summary: dict[str, Any]
    created: float


class Current(BaseModel):
    """Which bundle of a family, or of a variant of it, is current."""

    family: str
    variant: str
    bundle: str
    generation: int
    size: int


class Similarity(BaseModel):
    """Cosines between the task vectors of the latest experts."""

    experts: list[str]
    domains: list[str]
    cosines: list[list[float]]


class Report(Given):
    """How a device is doing. Numbers only: there is no field that could hold an image."""

    family: Annotated[str, Field(pattern=NAME)]
    device: Annotated[str, Field(pattern=NAME)]
    time: Annotated[Finite, Field(ge=0, lt=1e11)]
    bundle: Annotated[str, Field(pattern=DIGEST)] | None = None
    state: Literal["adapting", "settled"]
    batches: Count
    images: Count
    bad: Count = 0
    steps: Count = 0
    shifts: Count = 0
    fallbacks: Count = 0
    refused: Count = 0
    """Bundles of the hub that the device would not use."""
    entropy: Finite | None = None
    loss: Finite | None = None
    forwards: Finite = 0.0
    moved: Finite | None = None
    """How far the coefficients are from where the bundle started them."""
    weights: Annotated[dict[Annotated[str, Field(max_length=200)], Finite], Field(max_length=64), at_most(64)] = {}
    """Of each member of the bundle, and of the source model."""


Reports = Annotated[list[Report], Field(max_length=200), FailFast(), at_most(200)]


class DeviceShape(BaseModel):
    family: str
    device: str
    first_seen: float
    last_seen: float
    has_latest: bool
    """Whether the bundle it reported last is the newest of its kind."""
    last: Report


class Key(BaseModel):
    algorithm: Literal["ed25519"] = "ed25519"
    key: str


class Status(BaseModel):
    status: Literal["ok"] = "ok"


class Taken(BaseModel):
    taken: int
