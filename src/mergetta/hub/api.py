"""The routes of /v1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from mergetta.hub.access import Door, administrator, anyone, body_of, check_scope, consumer, contributor, hub_of, reader
from mergetta.hub.records import (
    ADMIN,
    QUARANTINED,
    RETIRED,
    BundleRecord,
    ExpertRecord,
    FamilyRecord,
    TokenRecord,
    Variant,
)
from mergetta.hub.screening import similarities
from mergetta.hub.shapes import (
    DIGEST,
    NAME,
    PLAIN,
    AuditShape,
    BundleShape,
    Current,
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
from mergetta.hub.store.storage import Unavailable

MAPPED = 60
"""Experts in a similarity map."""
FEWEST = 3
"""Contributors of a domain without which it is not left out of a bundle."""
CACHED = 10
"""Seconds for which a cache may say which bundle is current."""
FamilyName = Annotated[str, Path(pattern=NAME)]
ExpertId = Annotated[str, Path(pattern=DIGEST)]
DomainName = Annotated[str, Query(max_length=200, pattern=PLAIN)]
Anyone = Annotated[TokenRecord, Depends(anyone)]
Contributor = Annotated[TokenRecord, Depends(contributor)]
Consumer = Annotated[TokenRecord, Depends(consumer)]
Administrator = Annotated[TokenRecord, Depends(administrator)]
Reader = Annotated[TokenRecord | None, Depends(reader)]
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
readers = APIRouter(prefix="/v1", responses=DOORS, tags=["bundles"])


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
    """How an expert measures up, and the names of contributors, are for administrators: whoever knows the first can
    find out what just passes.
    """
    if token.role == ADMIN:
        names = hub.store.token_names({each.token for each in experts})
        return [ExpertShape(**vars(each), uploader=names.get(each.token, "")) for each in experts]
    return [ExpertShape(**{**vars(each), **hidden(each, token)}, uploader="") for each in experts]


def hidden(expert: ExpertRecord, token: TokenRecord) -> dict[str, Any]:
    """What contributors are told instead."""
    odd = expert.state == QUARANTINED and not expert.decided
    reason = "it is unlike the others" if odd else expert.reason
    return {"norm": None, "reason": reason, "token": expert.token if expert.token == token.id else ""}


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
    """Register a family with the file that `mergetta adapt --hub` sends. The same file again changes nothing.

    Whoever registers a family says what its source model is: that takes an administrator, or the token made for it.
    """
    if token.role != ADMIN and token.registers != family and not hub.settings.open:
        raise HTTPException(403, f"The family {family!r} is registered by an administrator, or by a token made for it.")
    async with body_of(request, token) as data:
        if await run_in_threadpool(hub.store.put_family, data, family, token.id):
            response.status_code = 201
    return await run_in_threadpool(get_family, family, hub, token)


@router.get("/families/{family}/file", tags=["families"], responses={**MISSING, 200: BYTES}, response_class=Response)
def get_family_file(family: FamilyName, hub: TheHub, token: Anyone) -> Response:
    """As it was registered: who contributes compares its own source model with it."""
    return Response(hub.store.blob(hub.store.family(family).blob), media_type="application/octet-stream")


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

    def add(data: bytes) -> tuple[ExpertRecord, bool]:
        return hub.store.add_expert(family, data, token.id, hub.file_of(family))

    async with body_of(request, token) as data:
        expert, created = await run_in_threadpool(add, data)
    if created:
        response.status_code = 201
        hub.builder.wake()
    return await run_in_threadpool(expert_shape, hub, token, expert)


@router.get("/families/{family}/experts", tags=["experts"], responses=MISSING)
def list_experts(
    family: FamilyName,
    hub: TheHub,
    token: Contributor,
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
def get_expert(expert: ExpertId, hub: TheHub, token: Contributor) -> ExpertShape:
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


@router.post("/tokens/{token_id}/approval", tags=["tokens"], status_code=204, responses=MISSING)
def approve(token_id: Annotated[str, Path(pattern=r"^[0-9a-f]{1,32}$")], hub: TheHub, token: Administrator) -> None:
    """Merge what a token has uploaded and will upload, as far as the screening finds nothing odd."""
    hub.store.approve_token(token_id, token.id)
    hub.builder.wake()


@router.get("/families/{family}/similarity", tags=["experts"], responses=MISSING)
def get_similarity(family: FamilyName, hub: TheHub, token: Anyone) -> Similarity:
    """How alike the latest experts are; nothing for who is no administrator."""
    hub.store.family(family)
    if token.role != ADMIN:
        return Similarity(experts=[], domains=[], cosines=[])
    experts = [e for e in hub.store.experts(family, limit=2 * MAPPED) if e.state != RETIRED][-MAPPED:]
    cosines = similarities([e.sketch for e in experts]).round(3).tolist() if experts else []
    return Similarity(experts=[e.id for e in experts], domains=[e.domain for e in experts], cosines=cosines)


BUILDING: dict[int | str, dict[str, Any]] = {
    202: {"model": Problem, "description": "Being built for the first time: ask again after `Retry-After` seconds."},
    304: {"description": "You have it."},
}
FOR_EVER = "max-age=31536000, immutable"


@readers.get(
    "/families/{family}/current",
    responses={**MISSING, **BUILDING, 200: {"model": Current}},
    response_class=Response,
)
async def get_current(
    family: FamilyName,
    request: Request,
    hub: TheHub,
    token: Reader,
    exclude: Annotated[list[DomainName] | None, Query(max_length=100)] = None,
    exclude_own: bool = False,
) -> Response:
    """Which bundle is current, signed like the bundle itself, which is at /v1/blobs. `ETag` is the bundle's SHA-256."""
    variant = variant_for(token, exclude, exclude_own)
    served = hub.fresh(family, variant) or await run_in_threadpool(find_bundle, hub, family, variant)
    if served is None:
        return being_built()
    pointer = hub.pointer(served)
    shared = hub.settings.public and not variant.key
    headers = headers_for(
        served.record, pointer.signature, f"public, max-age={CACHED}" if shared else "private, no-cache"
    )
    return unless_known(request, served.record, pointer.data, headers, "application/json")


@router.get(
    "/families/{family}/bundle",
    tags=["bundles"],
    response_class=Response,
    responses={**MISSING, **BUILDING, 200: BYTES},
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
    variant = variant_for(token, exclude, exclude_own)
    served = hub.fresh(family, variant) or await run_in_threadpool(find_bundle, hub, family, variant)
    if served is None:
        return being_built()
    headers = headers_for(served.record, served.record.signature, "no-cache")
    return unless_known(request, served.record, served.data, headers, "application/octet-stream")


def unless_known(
    request: Request, bundle: BundleRecord, data: bytes, headers: dict[str, str], media_type: str
) -> Response:
    """304 for who has the bundle already."""
    if bundle.id in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)


def variant_for(token: TokenRecord | None, exclude: Sequence[str] | None, exclude_own: bool) -> Variant:
    if token is None and (exclude or exclude_own):
        raise HTTPException(401, "Only the whole pool's bundle is public.", {"WWW-Authenticate": "Bearer"})
    return Variant.of(exclude or (), token.id if token and exclude_own else None)


def being_built() -> Response:
    return Response('{"detail": "This variant is being built."}', 202, {"Retry-After": "1"}, "application/json")


def headers_for(bundle: BundleRecord, signature: str | None, caching: str) -> dict[str, str]:
    headers = {"ETag": f'"{bundle.id}"', "Cache-Control": caching, "X-Mergetta-Generation": str(bundle.generation)}
    return {**headers, "X-Mergetta-Signature": signature} if signature else headers


def find_bundle(hub: Hub, family: str, variant: Variant) -> Served | None:
    """The bundle that the database knows. A variant is ordered; an older one of it does until then."""
    ordered, current = bool(variant.key), True
    if variant.key:
        check_variant(hub, family, variant)
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


def check_variant(hub: Hub, family: str, variant: Variant) -> None:
    """Two bundles that differ in the experts of one contributor give them away. One's own are no secret."""
    if hub.settings.open or not variant.domains:
        return
    try:
        contributors = hub.store.contributors(family, variant.domains)
    except Unavailable:
        return  # what is in memory was checked
    for domain, number in contributors.items():
        if number < FEWEST:
            raise HTTPException(403, f"Leaving out {domain!r} would give away the experts of {number} contributors.")


def may_have(hub: Hub, token: TokenRecord, bundle: BundleRecord) -> bool:
    """Whether this token could ask for a variant that is this bundle."""
    for variant in hub.store.variants_of(bundle.id):
        if variant.token in (None, token.id):
            with contextlib.suppress(HTTPException):
                check_variant(hub, bundle.family, variant)
                return True
    return token.role == ADMIN


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


@readers.get("/blobs/{digest}", responses={**MISSING, 200: BYTES}, response_class=Response)
def get_blob(digest: Annotated[str, Path(pattern=DIGEST)], hub: TheHub, token: Reader) -> Response:
    """A bundle by its SHA-256: never changes, may be cached for ever."""
    bundle = hub.store.bundle(digest)
    if token is None and bundle.variant:
        raise HTTPException(401, "Only the whole pool's bundle is public.", {"WWW-Authenticate": "Bearer"})
    if token is not None:
        check_scope(token, bundle.family)
        if bundle.variant and not may_have(hub, token, bundle):
            raise HTTPException(404, f"There is no bundle {digest}.")
    shared = hub.settings.public and not bundle.variant
    headers = headers_for(bundle, bundle.signature, f"{'public' if shared else 'private'}, {FOR_EVER}")
    return Response(hub.content(bundle), headers=headers, media_type="application/octet-stream")


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
