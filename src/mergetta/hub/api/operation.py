"""The hub itself: whether it runs, its key, its audit log."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from mergetta.hub.api.parts import MISSING, Administrator, TheHub, Whole, guarded
from mergetta.hub.records import AuditRecord
from mergetta.hub.shapes import Key, Problem, Status

open_routes = APIRouter(prefix="/v1", tags=["hub"])
router = guarded("hub")


@open_routes.get("/health", response_model=Status)
async def health() -> Status:
    """The process runs."""
    return Status()


@open_routes.get("/ready", response_model=Status, responses={503: {"model": Problem}})
def ready(hub: TheHub) -> Status:
    """Database and blobs answer, or did a second ago: anybody may ask, however often."""
    if time.monotonic() - hub.was_ready > 1:
        hub.store.check()
        hub.was_ready = time.monotonic()
    return Status()


@open_routes.get("/key", response_model=Key, responses=MISSING)
async def key(hub: TheHub) -> Key:
    """The public key that bundles are signed with."""
    if hub.signer is None:
        raise HTTPException(404, "This hub does not sign its bundles.")
    return Key(key=hub.signer.public_key)


@router.get("/audit")
def list_audit(
    hub: TheHub,
    token: Administrator,
    before: Annotated[int | None, Query(ge=0, lt=2**62), Whole] = None,
    limit: Annotated[int, Query(ge=1, le=1000), Whole] = 200,
) -> list[AuditRecord]:
    """Who did what, the latest first; those before an entry's number."""
    return hub.store.audit(limit, before)
