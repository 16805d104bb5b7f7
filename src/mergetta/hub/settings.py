"""How a hub runs: one typed object, from the command line to every worker process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mergetta.merging.members import MOST

VARIABLE = "MERGETTA_HUB_SETTINGS"


class Recipe(BaseModel):
    """How bundles are made from experts: the paper's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[float, Field(gt=0, le=1)] = 0.4
    max_rank: Annotated[int, Field(ge=1)] = 5
    tolerance: Annotated[float, Field(ge=0)] = 1e-2
    members: Annotated[int, Field(ge=0, le=256)] = MOST
    """Most members of a bundle: experts, or clusters of similar ones. 0 makes the paper's bundles, without any."""
    weight: Annotated[float, Field(ge=0)] = 1.4
    """Initial coefficients of all experts together. The paper's 0.1 for 14 experts is 1.4; a pool of thousands needs
    a share of a fixed sum, or the merge would run away with its size."""


class Limits(BaseModel):
    """How much one token may make the hub keep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experts_per_token: Annotated[int, Field(ge=1)] = 500
    """Of one family; those that have retired count while their content is kept."""
    families_per_token: Annotated[int, Field(ge=1)] = 20
    """That it has registered, which only administrators may do without a limit."""
    devices_per_token: Annotated[int, Field(ge=1)] = 10_000
    """Of one family."""
    variants_per_token: Annotated[int, Field(ge=1)] = 20
    """Of one family, that this token was the first to ask for: nobody uses up those that the hub keeps."""
    device_days: Annotated[float, Field(gt=0)] = 90.0
    """A device that has not been heard of for so long is forgotten."""
    retired_days: Annotated[float, Field(ge=0)] = 7.0
    """How long the content of an expert is kept after it has retired."""


class HubSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    database: str = "sqlite:///hub/hub.db"
    blobs: str = "hub/blobs"
    """A folder, or any address that fsspec knows (s3://bucket/path)."""
    recipe: Recipe = Recipe()
    max_upload: int = 64 * 2**20
    """Bytes of one request body."""
    signing_key: str | None = None
    """Path of an Ed25519 private key (PEM); bundles are signed with it."""
    public: bool = False
    """Whether anybody may have the bundles of the whole pool, and caches may keep them."""
    screen: bool = True
    probe: bool = True
    """Whether newcomers wait until their family has images to try them on. Not in a hub that is open."""
    build_every: Annotated[float, Field(gt=0)] = 1.0
    """Seconds between two looks for new experts."""
    pool_memory: int = 2 * 2**30
    """Bytes of scatter matrices and clusters kept in memory; the families used last stay."""
    reports_kept: Annotated[int, Field(ge=1)] = 500
    """Per device."""
    limits: Limits = Limits()
    open: bool = False
    """For a lab whose contributors trust one another: every token's uploads are merged without approval, contributors
    register families, and any domain can be left out of a bundle."""
    bundle_days: Annotated[float, Field(ge=1)] | None = None
    """How long devices take a bundle after it was made; None for ever."""

    @property
    def wants_probes(self) -> bool:
        return self.screen and self.probe and not self.open

    @classmethod
    def in_folder(cls, folder: Path, **others: object) -> HubSettings:
        """Everything below one folder: SQLite and plain files."""
        return cls(database=f"sqlite:///{folder / 'hub.db'}", blobs=str(folder / "blobs"), **others)  # type: ignore[arg-type]

    def to_environment(self) -> None:
        """For worker processes, which are started without arguments."""
        os.environ[VARIABLE] = self.model_dump_json()

    @classmethod
    def from_environment(cls) -> HubSettings:
        return cls.model_validate_json(os.environ[VARIABLE])
