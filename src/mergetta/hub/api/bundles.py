"""Bundles: which is current, by digest, and without some experts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from mergetta.hub.access import check_scope
from mergetta.hub.api.parts import BYTES, DOORS, MISSING, Anyone, Consumer, FamilyName, Flag, Reader, TheHub, guarded
from mergetta.hub.records import ADMIN, BundleRecord, TokenRecord, Variant
from mergetta.hub.shapes import DIGEST, PLAIN, BundleShape, Current, Problem
from mergetta.hub.state import Hub, Served
from mergetta.hub.store.storage import Unavailable

FEWEST = 3
"""Contributors of a domain without which it is not left out of a bundle."""
CACHED = 10
"""Seconds for which a cache may say which bundle is current."""
DomainName = Annotated[str, Query(max_length=200, pattern=PLAIN)]
Domains = Annotated[list[DomainName] | None, Query(max_length=100)]
router = guarded("bundles")
readers = APIRouter(prefix="/v1", responses=DOORS, tags=["bundles"])
"""Who asks is known here too, but may be anybody where bundles are public."""
BUILDING: dict[int | str, dict[str, Any]] = {
    202: {"model": Problem, "description": "Being built for the first time: ask again after `Retry-After` seconds."},
    304: {"description": "You have it."},
    409: {"model": Problem, "description": "Too many variants are in use."},
}
FOR_EVER = "max-age=31536000, immutable"


def bundle_shape(bundle: BundleRecord, token: TokenRecord) -> BundleShape:
    """Who counts less than others is for administrators: whoever knew could find out what just passes."""
    told = {key: value for key, value in bundle.summary.items() if key != "counts_less" or token.role == ADMIN}
    return BundleShape(**{**{name: getattr(bundle, name) for name in BundleShape.model_fields}, "summary": told})


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
    exclude: Domains = None,
    exclude_own: Flag = False,
) -> Response:
    """Which bundle is current, signed like the bundle itself, which is at /v1/blobs. `ETag` is the bundle's SHA-256."""
    variant = variant_for(token, exclude, exclude_own)
    served = hub.fresh(family, variant) or await run_in_threadpool(find_bundle, hub, family, variant, token)
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
    response_class=Response,
    responses={**MISSING, **BUILDING, 200: BYTES},
)
async def get_bundle(
    family: FamilyName,
    request: Request,
    hub: TheHub,
    token: Consumer,
    exclude: Domains = None,
    exclude_own: Flag = False,
) -> Response:
    """The current bundle; without some domains or one's own uploads if asked so. `ETag` is its SHA-256."""
    variant = variant_for(token, exclude, exclude_own)
    served = hub.fresh(family, variant) or await run_in_threadpool(find_bundle, hub, family, variant, token)
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


def nothing_merged(hub: Hub, family: str) -> HTTPException:
    if hub.lacks_probes(hub.store.family(family)):
        return HTTPException(
            404, f"The family {family!r} has no bundle yet: it lacks probe images (mergetta hub probe)."
        )
    return HTTPException(404, f"The family {family!r} has no experts to merge yet.")


def being_built() -> Response:
    return Response('{"detail": "This variant is being built."}', 202, {"Retry-After": "1"}, "application/json")


def headers_for(bundle: BundleRecord, signature: str | None, caching: str) -> dict[str, str]:
    headers = {"ETag": f'"{bundle.id}"', "Cache-Control": caching, "X-Mergetta-Generation": str(bundle.generation)}
    return {**headers, "X-Mergetta-Signature": signature} if signature else headers


def find_bundle(hub: Hub, family: str, variant: Variant, token: TokenRecord | None) -> Served | None:
    """The bundle that the database knows. A variant is ordered; an older one of it does until then."""
    ordered, current = bool(variant.key), True
    if variant.key:
        check_variant(hub, family, variant)
        try:
            generation = hub.store.family(family).generation
            known = hub.store.want(family, variant, token.id if token else None)
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
        raise nothing_merged(hub, family)
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
            whose = "one contributor" if number == 1 else f"{number} contributors"
            raise HTTPException(403, f"Leaving out {domain!r} would give away the experts of {whose}.")


def may_have(hub: Hub, token: TokenRecord, bundle: BundleRecord) -> bool:
    """Whether this token could ask for a variant that is this bundle."""
    for variant in hub.store.variants_of(bundle.id):
        if variant.token in (None, token.id):
            with contextlib.suppress(HTTPException):
                check_variant(hub, bundle.family, variant)
                return True
    return token.role == ADMIN


@router.get("/families/{family}/bundle/summary", responses=MISSING)
def get_bundle_summary(family: FamilyName, hub: TheHub, token: Anyone) -> BundleShape:
    """What is in the current bundle: rank per group, energy kept, size."""
    hub.store.family(family)
    current = hub.store.current(family, Variant())
    if current is None:
        raise nothing_merged(hub, family)
    return bundle_shape(current, token)


@router.get("/families/{family}/bundles", responses=MISSING)
def list_bundles(family: FamilyName, hub: TheHub, token: Anyone) -> list[BundleShape]:
    """The bundles so far, oldest first."""
    hub.store.family(family)
    return [bundle_shape(bundle, token) for bundle in hub.store.history(family)]


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
