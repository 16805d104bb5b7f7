"""What the store hands out: small frozen values, one per kind of thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PENDING, ACTIVE, QUARANTINED, RETIRED = "pending", "active", "quarantined", "retired"
"""Of an expert: not looked at yet; merged; kept out until somebody decides; out for good."""
CONTRIBUTE, CONSUME, ADMIN = "contribute", "consume", "admin"
ROLES = (CONTRIBUTE, CONSUME, ADMIN)


@dataclass(frozen=True)
class FamilyRecord:
    id: str
    blob: str
    note: str
    preprocessing: dict[str, Any]
    groups: int
    parameters: int
    created: float
    epoch: int
    generation: int
    built: int
    probes: str = ""
    """The blob of the images and the model that experts are tried on; empty without."""


@dataclass(frozen=True)
class ExpertRecord:
    id: str
    family: str
    domain: str
    method: str
    samples: int | None
    size: int
    norm: float
    layers: bytes
    sketch: bytes
    state: str
    reason: str
    decided: bool
    """A person set the state: the screening leaves it alone."""
    token: str
    created: float
    changed: float
    revision: int
    probes: str | None = None
    """The probes that it was tried on last, at which usual length, and what harm it did."""
    usual: float | None = None
    harm: float | None = None
    moments: bytes = b""
    """Which way its moments lie from the source's."""


@dataclass(frozen=True)
class BundleRecord:
    id: str
    family: str
    variant: str
    generation: int
    signature: str | None
    size: int
    experts: int
    dimension: int
    summary: dict[str, Any]
    created: float


@dataclass(frozen=True)
class Variant:
    """A bundle without some domains, or without the uploads of one token."""

    domains: tuple[str, ...] = ()
    token: str | None = None

    @classmethod
    def of(cls, domains: Iterable[str] = (), token: str | None = None) -> Variant:
        return cls(tuple(sorted(set(domains))), token)

    @property
    def key(self) -> str:
        """Empty for the whole pool."""
        if not self.domains and self.token is None:
            return ""
        return hashlib.sha256(json.dumps([self.domains, self.token]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenRecord:
    id: str
    name: str
    role: str
    rate: float
    max_upload: int
    created: float
    revoked: float | None = None
    approved: float | None = None
    """Since when its uploads are merged; until then they wait."""
    registers: str = ""
    """The family that it may register; administrators register any."""
    expires: float | None = None
    last_used: float | None = None
    families: list[str] | None = None
    """That it is for; None for all."""
    device: str | None = None
    """That it reports for; None for any."""

    def may(self, role: str) -> bool:
        return self.role in (role, ADMIN)

    def sees(self, family: str) -> bool:
        return self.families is None or family in self.families


@dataclass(frozen=True)
class DeviceRecord:
    family: str
    device: str
    token: str
    first_seen: float
    last_seen: float
    last: dict[str, Any]


@dataclass(frozen=True)
class AuditRecord:
    """One line of who did what."""

    number: int
    time: float
    actor: str
    """A token's id, `command line` or `screening`."""
    name: str
    """Of the token that acted, for people."""
    action: str
    subject: str
    family: str
    why: str
