"""What the routes share: who asks, what is named in a path, and how answers are described."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BeforeValidator

from mergetta.hub.access import Door, administrator, anyone, consumer, contributor, hub_of, reader
from mergetta.hub.records import TokenRecord
from mergetta.hub.shapes import DIGEST, NAME, Problem
from mergetta.hub.state import Hub


def written(pattern: str) -> BeforeValidator:
    """A value in a query is written like this: pydantic alone takes ` 1_0` for 10, and `yes` for true."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"this must look like {pattern}")
        return text

    return BeforeValidator(check)


Whole = written(r"-?\d{1,19}(\.0{1,19})?")
Number = written(r"-?\d{1,19}(\.\d{1,19})?([eE][+-]?\d{1,3})?")
Flag = Annotated[bool, written("true|false")]
FamilyName = Annotated[str, Path(pattern=NAME)]
ExpertId = Annotated[str, Path(pattern=DIGEST)]
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


def guarded(*tags: str) -> APIRouter:
    """Routes below /v1 that know who asks before they read anything."""
    return APIRouter(prefix="/v1", tags=list(tags), responses=DOORS, route_class=Door)
