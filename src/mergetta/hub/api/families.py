"""Families: who registers them, and what is known of them."""

from __future__ import annotations

from fastapi import HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool

from mergetta.hub.access import Body, body_of
from mergetta.hub.api.parts import (
    BYTES,
    MISSING,
    RAW,
    UPLOAD,
    Administrator,
    Anyone,
    Contributor,
    FamilyName,
    TheHub,
    guarded,
)
from mergetta.hub.records import ADMIN, FamilyRecord, Variant
from mergetta.hub.shapes import FamilyShape
from mergetta.hub.state import Hub

router = guarded("families")


def family_shape(hub: Hub, family: FamilyRecord) -> FamilyShape:
    current = hub.store.current(family.id, Variant())
    return FamilyShape(
        **{name: getattr(family, name) for name in ("id", "note", "preprocessing", "groups", "parameters", "created")},
        experts=hub.store.counts(family.id),
        bundle=current.id if current else None,
        lacks_probes=hub.lacks_probes(family),
        up_to_date=family.built >= family.generation,
        waiting_since=hub.store.waiting_since(family),
    )


@router.get("/families")
def list_families(hub: TheHub, token: Anyone) -> list[FamilyShape]:
    return [family_shape(hub, family) for family in hub.store.families() if token.sees(family.id)]


@router.get("/families/{family}", responses=MISSING)
def get_family(family: FamilyName, hub: TheHub, token: Anyone) -> FamilyShape:
    return family_shape(hub, hub.store.family(family))


@router.delete("/families/{family}", status_code=204, responses=MISSING)
def delete_family(family: FamilyName, hub: TheHub, token: Administrator) -> None:
    """Forget a family with all its experts, bundles and devices: there is no way back."""
    hub.store.delete_family(family, token.id)


@router.put("/families/{family}", responses={**UPLOAD, 201: {"model": FamilyShape}}, openapi_extra=RAW)
async def put_family(
    family: FamilyName, request: Request, response: Response, hub: TheHub, token: Contributor
) -> FamilyShape:
    """Register a family with the file that `mergetta adapt --hub` sends. The same file again changes nothing.

    Whoever registers a family says what its source model is: that takes an administrator, or the token made for it.
    """
    if token.role != ADMIN and token.registers != family and not hub.settings.open:
        who = "an administrator (mergetta hub probe), or by a token made for it"
        raise HTTPException(403, f"The family {family!r} is registered by {who}.")

    def put(body: Body) -> bool:
        return hub.store.put_family(body.read(), family, token.id)

    async with body_of(request, token) as body:
        if await run_in_threadpool(put, body):
            response.status_code = 201
    return await run_in_threadpool(get_family, family, hub, token)


@router.get("/families/{family}/file", responses={**MISSING, 200: BYTES}, response_class=Response)
def get_family_file(family: FamilyName, hub: TheHub, token: Anyone) -> Response:
    """As it was registered: who contributes compares its own source model with it."""
    return Response(hub.store.blob(hub.store.family(family).blob), media_type="application/octet-stream")
