"""Tokens: whose uploads are merged."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from mergetta.hub.api.parts import MISSING, Administrator, TheHub, guarded

router = guarded("tokens")


@router.post("/tokens/{token_id}/approval", status_code=204, responses=MISSING)
def approve(token_id: Annotated[str, Path(pattern=r"^[0-9a-f]{1,32}$")], hub: TheHub, token: Administrator) -> None:
    """Merge what a token has uploaded and will upload, as far as the screening finds nothing odd."""
    hub.store.approve_token(token_id, token.id)
    hub.builder.wake()
