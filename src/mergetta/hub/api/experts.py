"""Experts: uploads, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from mergetta.hub.access import Body, body_of, check_scope
from mergetta.hub.api.parts import (
    BYTES,
    MISSING,
    RAW,
    UPLOAD,
    Administrator,
    Anyone,
    Contributor,
    ExpertId,
    FamilyName,
    Number,
    TheHub,
    Whole,
    guarded,
)
from mergetta.hub.records import ADMIN, PENDING, QUARANTINED, RETIRED, ExpertRecord, TokenRecord
from mergetta.hub.screening import similarities
from mergetta.hub.shapes import Decision, ExpertShape, Problem, Similarity
from mergetta.hub.state import Hub

MAPPED = 60
"""Experts in a similarity map."""
router = guarded("experts")


def expert_shapes(hub: Hub, token: TokenRecord, experts: Sequence[ExpertRecord]) -> list[ExpertShape]:
    """How an expert measures up, and the names of contributors, are for administrators: whoever knows the first can
    find out what just passes.
    """
    admin = token.role == ADMIN
    names = hub.store.token_names({each.token for each in experts}) if admin else {}
    unlooked = not hub.settings.open and any(each.state == PENDING for each in experts)
    unapproved = hub.store.unapproved() if unlooked else set()
    families = {each.family for each in experts if unlooked}
    unprobed = {family for family in families if hub.lacks_probes(hub.store.family(family))}
    shapes = []
    for each in experts:
        known = each if admin or each.token == token.id else replace(each, token="")
        waits = each.state == PENDING and each.token in unapproved
        told = {**vars(known), "uploader": names.get(each.token, ""), "waits": waits}
        if waits:
            told["reason"] = f"waits for an administrator: mergetta hub token approve {known.token}".strip()
        elif each.state == PENDING and each.family in unprobed:
            told["reason"] = "waits for probe images: mergetta hub probe"
        elif not admin and each.state == QUARANTINED and not each.decided:
            told["reason"] = "it is unlike the others"
        shapes.append(ExpertShape(**told if admin else {**told, "norm": None}))
    return shapes


def expert_shape(hub: Hub, token: TokenRecord, expert: ExpertRecord) -> ExpertShape:
    return expert_shapes(hub, token, [expert])[0]


@router.post(
    "/families/{family}/experts",
    responses={**UPLOAD, **MISSING, 201: {"model": ExpertShape}},
    openapi_extra=RAW,
)
async def post_expert(
    family: FamilyName, request: Request, response: Response, hub: TheHub, token: Contributor
) -> ExpertShape:
    """Upload an expert file. The same content has the same id, however often it is sent."""

    def add(body: Body) -> tuple[ExpertRecord, bool]:
        return hub.store.add_expert(family, body.read(), token.id, hub.file_of(family), body.digest)

    await run_in_threadpool(hub.store.family, family)  # before anything is read
    async with body_of(request, token) as body:
        expert, created = await run_in_threadpool(add, body)
    if created:
        response.status_code = 201
        hub.builder.wake()
    return await run_in_threadpool(expert_shape, hub, token, expert)


@router.get("/families/{family}/experts", responses=MISSING)
def list_experts(
    family: FamilyName,
    hub: TheHub,
    token: Contributor,
    state: Literal["pending", "active", "quarantined", "retired"] | None = None,
    uploader: Annotated[str | None, Query(pattern=r"^[0-9a-f]{1,32}$")] = None,
    before: Annotated[float | None, Query(ge=0, lt=1e11), Number] = None,
    limit: Annotated[int, Query(ge=1, le=1000), Whole] = 200,
) -> list[ExpertShape]:
    """The latest experts (in one state, of one token, from before a time), in the order of their arrival."""
    hub.store.family(family)
    states = (state,) if state else None
    found = hub.store.experts(family, states, limit=limit, token=uploader, before=before)
    return expert_shapes(hub, token, found)


@router.get("/experts/{expert}", responses=MISSING)
def get_expert(expert: ExpertId, hub: TheHub, token: Contributor) -> ExpertShape:
    found = hub.store.expert(expert)
    check_scope(token, found.family)
    return expert_shape(hub, token, found)


@router.get("/experts/{expert}/content", responses={**MISSING, 200: BYTES}, response_class=Response)
def get_expert_content(expert: ExpertId, hub: TheHub, token: Administrator) -> Response:
    """The file as it was uploaded."""
    hub.store.expert(expert)
    return Response(hub.store.blob(expert), media_type="application/octet-stream")


@router.post("/experts/{expert}/state", responses={**MISSING, 409: {"model": Problem}})
def decide(expert: ExpertId, decision: Decision, hub: TheHub, token: Contributor) -> ExpertShape:
    """Accept (active), quarantine or retire an expert. Contributors may retire what they have uploaded."""
    found = hub.store.expert(expert)
    check_scope(token, found.family)
    if token.role != ADMIN and not (decision.state == RETIRED and found.token == token.id):
        raise HTTPException(403, "Only an administrator decides on experts; contributors may retire their own.")
    changed = hub.store.decide(expert, decision.state, decision.reason, token.id)
    hub.builder.wake()
    return expert_shape(hub, token, changed)


@router.get("/families/{family}/similarity", responses=MISSING)
def get_similarity(family: FamilyName, hub: TheHub, token: Anyone) -> Similarity:
    """How alike the latest experts are; nothing for who is no administrator."""
    hub.store.family(family)
    if token.role != ADMIN:
        return Similarity(experts=[], domains=[], cosines=[])
    experts = [e for e in hub.store.experts(family, limit=2 * MAPPED) if e.state != RETIRED][-MAPPED:]
    cosines = similarities([e.sketch for e in experts]).round(3).tolist() if experts else []
    return Similarity(experts=[e.id for e in experts], domains=[e.domain for e in experts], cosines=cosines)
