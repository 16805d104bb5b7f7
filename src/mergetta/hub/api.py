"""The routes of /v1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from mergetta.hub.access import Door, administrator, anyone, body_of, check_scope, consumer, contributor, hub_of
from mergetta.hub.records import ADMIN, RETIRED, BundleRecord, ExpertRecord, FamilyRecord, TokenRecord, Variant
from mergetta.hub.screening import similarities
from mergetta.hub.shapes import (
    DIGEST,
    NAME,
    PLAIN,
    AuditShape,
    BundleShape,
    Decision,
    DeviceShape,
    ExpertShape,
    FamilyShape,
    Key,
    Problem,
    Report,
    Reports,
    Similarity,
    Status,
    Taken,
)
from mergetta.hub.state import Hub, Served
from mergetta.hub.storage import Unavailable

MAPPED = 60
"""Experts in a similarity map."""
FamilyName = Annotated[str, Path(pattern=NAME)]
ExpertId = Annotated[str, Path(pattern=DIGEST)]
DomainName = Annotated[str, Query(max_length=200, pattern=PLAIN)]
Anyone = Annotated[TokenRecord, Depends(anyone)]
Contributor = Annotated[TokenRecord, Depends(contributor)]
Consumer = Annotated[TokenRecord, Depends(consumer)]
Administrator = Annotated[TokenRecord, Depends(administrator)]
TheHub = Annotated[Hub, Depends(hub_of)]

DOORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 403, 408, 413, 422, 429, 503)
}
MISSING: dict[int | str, dict[str, Any]] = {404: {"model": Problem}}
UPLOAD: dict[int | str, dict[str, Any]] = {409: {"model": Problem}}
BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
RAW = {"requestBody": {"required": True, **BYTES}}

open_routes = APIRouter(prefix="/v1", tags=["hub"])
router = APIRouter(prefix="/v1", responses=DOORS, route_class=Door)


@open_routes.get("/health", response_model=Status)
async def health() -> Status:
    """The process runs."""
    return Status()


@open_routes.get("/ready", response_model=Status, responses={503: {"model": Problem}})
def ready(hub: TheHub) -> Status:
    """Database and blobs answer."""
    hub.store.check()
    return Status()


@open_routes.get("/key", response_model=Key, responses=MISSING)
async def key(hub: TheHub) -> Key:
    """The public key that bundles are signed with."""
    if hub.signer is None:
        raise HTTPException(404, "This hub does not sign its bundles.")
    return Key(key=hub.signer.public_key)


def family_shape(hub: Hub, family: FamilyRecord) -> FamilyShape:
    current = hub.store.current(family.id, Variant())
    return FamilyShape(
        **{name: getattr(family, name) for name in ("id", "note", "preprocessing", "groups", "parameters", "created")},
        experts=hub.store.counts(family.id),
        bundle=current.id if current else None,
        up_to_date=family.built >= family.generation,
        waiting_since=hub.store.waiting_since(family),
    )


def expert_shapes(hub: Hub, token: TokenRecord, experts: Sequence[ExpertRecord]) -> list[ExpertShape]:
    """With the names of their contributors for administrators; others are told ids."""
    names = hub.store.token_names({each.token for each in experts}) if token.role == ADMIN else {}
    return [ExpertShape(**vars(each), uploader=names.get(each.token, "")) for each in experts]


def expert_shape(hub: Hub, token: TokenRecord, expert: ExpertRecord) -> ExpertShape:
    return expert_shapes(hub, token, [expert])[0]


def bundle_shape(bundle: BundleRecord) -> BundleShape:
    return BundleShape(**{name: getattr(bundle, name) for name in BundleShape.model_fields})


@router.get("/families", tags=["families"])
def list_families(hub: TheHub, token: Anyone) -> list[FamilyShape]:
    return [family_shape(hub, family) for family in hub.store.families() if token.sees(family.id)]


@router.get("/families/{family}", tags=["families"], responses=MISSING)
def get_family(family: FamilyName, hub: TheHub, token: Anyone) -> FamilyShape:
    return family_shape(hub, hub.store.family(family))


@router.delete("/families/{family}", tags=["families"], status_code=204, responses=MISSING)
def delete_family(family: FamilyName, hub: TheHub, token: Administrator) -> None:
    """Forget a family with all its experts, bundles and devices: there is no way back."""
    hub.store.delete_family(family, token.id)


@router.put(
    "/families/{family}", tags=["families"], responses={**UPLOAD, 201: {"model": FamilyShape}}, openapi_extra=RAW
)
async def put_family(
    family: FamilyName, request: Request, response: Response, hub: TheHub, token: Contributor
) -> FamilyShape:
    """Register a family with the file that `mergetta adapt --hub` sends. The same file again changes nothing."""
    data = await body_of(request, token)
    if await run_in_threadpool(hub.store.put_family, data, family, token.id):
        response.status_code = 201
    return await run_in_threadpool(get_family, family, hub, token)


@router.post(
    "/families/{family}/experts",
    tags=["experts"],
    responses={**UPLOAD, **MISSING, 201: {"model": ExpertShape}},
    openapi_extra=RAW,
)
async def post_expert(
    family: FamilyName, request: Request, response: Response, hub: TheHub, token: Contributor
) -> ExpertShape:
    """Upload an expert file. The same content has the same id, however often it is sent."""
    data = await body_of(request, token)

    def add() -> tuple[ExpertRecord, bool]:
        return hub.store.add_expert(family, data, token.id, hub.file_of(family))

    expert, created = await run_in_threadpool(add)
    if created:
        response.status_code = 201
        hub.builder.wake()
    return await run_in_threadpool(expert_shape, hub, token, expert)


@router.get("/families/{family}/experts", tags=["experts"], responses=MISSING)
def list_experts(
    family: FamilyName,
    hub: TheHub,
    token: Anyone,
    state: Literal["pending", "active", "quarantined", "retired"] | None = None,
    uploader: Annotated[str | None, Query(pattern=r"^[0-9a-f]{1,32}$")] = None,
    before: Annotated[float | None, Query(ge=0, lt=1e11)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> list[ExpertShape]:
    """The latest experts (in one state, of one token, from before a time), in the order of their arrival."""
    hub.store.family(family)
    states = (state,) if state else None
    found = hub.store.experts(family, states, limit=limit, token=uploader, before=before)
    return expert_shapes(hub, token, found)


@router.get("/experts/{expert}", tags=["experts"], responses=MISSING)
def get_expert(expert: ExpertId, hub: TheHub, token: Anyone) -> ExpertShape:
    found = hub.store.expert(expert)
    check_scope(token, found.family)
    return expert_shape(hub, token, found)


@router.get("/experts/{expert}/content", tags=["experts"], responses={**MISSING, 200: BYTES}, response_class=Response)
def get_expert_content(expert: ExpertId, hub: TheHub, token: Administrator) -> Response:
    """The file as it was uploaded."""
    hub.store.expert(expert)
    return Response(hub.store.blob(expert), media_type="application/octet-stream")


@router.post("/experts/{expert}/state", tags=["experts"], responses={**MISSING, 409: {"model": Problem}})
def decide(expert: ExpertId, decision: Decision, hub: TheHub, token: Contributor) -> ExpertShape:
    """Accept (active), quarantine or retire an expert. Contributors may retire what they have uploaded."""
    found = hub.store.expert(expert)
    check_scope(token, found.family)
    if token.role != ADMIN and not (decision.state == RETIRED and found.token == token.id):
        raise HTTPException(403, "Only an administrator decides on experts; contributors may retire their own.")
    changed = hub.store.decide(expert, decision.state, decision.reason, token.id)
    hub.builder.wake()
    return expert_shape(hub, token, changed)


@router.get("/families/{family}/similarity", tags=["experts"], responses=MISSING)
def get_similarity(family: FamilyName, hub: TheHub, token: Anyone) -> Similarity:
    """How alike the latest experts are."""
    hub.store.family(family)
    experts = [e for e in hub.store.experts(family, limit=2 * MAPPED) if e.state != RETIRED][-MAPPED:]
    cosines = similarities([e.sketch for e in experts]).round(3).tolist() if experts else []
    return Similarity(experts=[e.id for e in experts], domains=[e.domain for e in experts], cosines=cosines)


@router.get(
    "/families/{family}/bundle",
    tags=["bundles"],
    response_class=Response,
    responses={
        **MISSING,
        200: BYTES,
        202: {
            "model": Problem,
            "description": "Being built for the first time: ask again after `Retry-After` seconds.",
        },
        304: {"description": "You have it."},
    },
)
async def get_bundle(
    family: FamilyName,
    request: Request,
    hub: TheHub,
    token: Consumer,
    exclude: Annotated[list[DomainName] | None, Query(max_length=100)] = None,
    exclude_own: bool = False,
) -> Response:
    """The current bundle; without some domains or one's own uploads if asked so. `ETag` is its SHA-256."""
    variant = Variant.of(exclude or (), token.id if exclude_own else None)
    served = hub.fresh(family, variant)
    if served is None:
        served = await run_in_threadpool(find_bundle, hub, family, variant)
    if served is None:
        return Response('{"detail": "This variant is being built."}', 202, {"Retry-After": "1"}, "application/json")
    bundle = served.record
    headers = {"ETag": f'"{bundle.id}"', "Cache-Control": "no-cache", "X-Mergetta-Generation": str(bundle.generation)}
    if bundle.signature:
        headers["X-Mergetta-Signature"] = bundle.signature
    if bundle.id in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(served.data, headers=headers, media_type="application/octet-stream")


def find_bundle(hub: Hub, family: str, variant: Variant) -> Served | None:
    """The bundle that the database knows. A variant is ordered; an older one of it does until then."""
    ordered, current = bool(variant.key), True
    if variant.key:
        try:
            generation = hub.store.family(family).generation
            known = hub.store.want(family, variant)
            hub.builder.wake()
            ordered = hub.store.variant_built(family, variant) < generation  # first: it may be built any moment
            current = known or not ordered
        except Unavailable:
            pass  # what is in memory will do
    served = hub.bundle(family, variant) if current else None  # what nobody asked for in a long time may be poisoned
    if served is None:
        hub.store.family(family)
        if ordered:
            return None
        raise HTTPException(404, f"The family {family!r} has no experts to merge yet.")
    return served


@router.get("/families/{family}/bundle/summary", tags=["bundles"], responses=MISSING)
def get_bundle_summary(family: FamilyName, hub: TheHub, token: Anyone) -> BundleShape:
    """What is in the current bundle: rank per group, energy kept, size."""
    hub.store.family(family)
    current = hub.store.current(family, Variant())
    if current is None:
        raise HTTPException(404, f"The family {family!r} has no experts to merge yet.")
    return bundle_shape(current)


@router.get("/families/{family}/bundles", tags=["bundles"], responses=MISSING)
def list_bundles(family: FamilyName, hub: TheHub, token: Anyone) -> list[BundleShape]:
    """The bundles so far, oldest first."""
    hub.store.family(family)
    return [bundle_shape(bundle) for bundle in hub.store.history(family)]


@router.get("/blobs/{digest}", tags=["bundles"], responses={**MISSING, 200: BYTES}, response_class=Response)
def get_blob(digest: Annotated[str, Path(pattern=DIGEST)], hub: TheHub, token: Consumer) -> Response:
    """A bundle by its SHA-256: never changes, may be cached for ever."""
    headers = {"Cache-Control": "private, max-age=31536000, immutable", "ETag": f'"{digest}"'}
    bundle = hub.store.bundle(digest)
    check_scope(token, bundle.family)
    if bundle.signature:
        headers["X-Mergetta-Signature"] = bundle.signature
    return Response(hub.store.blob(digest), headers=headers, media_type="application/octet-stream")


@router.post("/reports", tags=["devices"], status_code=201, responses=MISSING)
def post_reports(reports: Reports, hub: TheHub, token: Consumer) -> Taken:
    """How devices are doing; several at once after a time without connection."""
    for report in reports:
        check_scope(token, report.family)
        if token.device not in (None, report.device):
            raise HTTPException(403, f"This token reports for {token.device!r}, not for {report.device!r}.")
    hub.store.add_reports([report.model_dump() for report in reports], token.id)
    return Taken(taken=len(reports))


@router.get("/families/{family}/devices", tags=["devices"], responses=MISSING)
def list_devices(family: FamilyName, hub: TheHub, token: Anyone) -> list[DeviceShape]:
    hub.store.family(family)
    latest = hub.store.latest(family)
    return [
        DeviceShape(
            family=family,
            device=device.device,
            first_seen=device.first_seen,
            last_seen=device.last_seen,
            has_latest=device.last.get("bundle") in latest,
            last=Report(**device.last),
        )
        for device in hub.store.devices(family)
    ]


@router.get("/families/{family}/devices/{device}/reports", tags=["devices"], responses=MISSING)
def list_reports(
    family: FamilyName, device: Annotated[str, Path(pattern=NAME)], hub: TheHub, token: Anyone
) -> list[Report]:
    """Oldest first."""
    hub.store.family(family)
    return [Report(**report) for report in hub.store.reports(family, device)]


@router.get("/audit", tags=["hub"])
def list_audit(
    hub: TheHub,
    token: Administrator,
    before: Annotated[int | None, Query(ge=0, lt=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> list[AuditShape]:
    """Who did what, the latest first; those before an entry's number."""
    return [AuditShape(**vars(entry)) for entry in hub.store.audit(limit, before)]
