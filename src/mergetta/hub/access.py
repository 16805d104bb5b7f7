"""The door: bearer tokens, roles, rates, and bodies no larger than allowed."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Annotated, Any, BinaryIO, NamedTuple

from fastapi import HTTPException, Request, Response, Security, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer

from mergetta.hub.frame import BODY_LIMIT
from mergetta.hub.records import ADMIN, CONSUME, CONTRIBUTE, TokenRecord
from mergetta.hub.state import Hub
from mergetta.hub.store.storage import Unavailable, reachable

COOKIE = "mergetta_session"
HEADER = "x-mergetta-dashboard"
"""Sent by the dashboard's own scripts. Another site can make a browser send a cookie, but not this header."""
bearer = HTTPBearer(auto_error=False, description="`mergetta hub token create` makes one.")
cookie = APIKeyCookie(name=COOKIE, auto_error=False, description="Set by the dashboard's login.")


def hub_of(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


async def identify(hub: Hub, secret: str, session: bool = False) -> TokenRecord:
    """The token behind a secret, its own or a session's; 401 if there is none (any more), 429 if it comes too often."""
    gate = hub.gate
    if gate.must_follow():
        with contextlib.suppress(Unavailable):  # readers go on
            await run_in_threadpool(gate.follow, hub.store)
    token = gate.remembered(secret, session)
    if token is None:
        token = await run_in_threadpool(hub.store.find_session if session else hub.store.find_token, secret)
        if token is not None:
            gate.remember(secret, token, session)
    if token is None or gate.refuses(token):
        raise HTTPException(401, "This token is unknown, revoked or expired.", {"WWW-Authenticate": "Bearer"})
    wait = gate.wait(token)
    if wait:
        raise HTTPException(429, "Too many requests for this token.", {"Retry-After": str(math.ceil(wait))})
    return token


async def authenticated(request: Request) -> TokenRecord:
    """Whoever sent a request, by bearer token or by the dashboard's cookie."""
    given, stored = await bearer(request), await cookie(request)
    if given:
        return await identify(hub_of(request), given.credentials)
    if stored and (request.method == "GET" or HEADER in request.headers):
        return await identify(hub_of(request), stored, session=True)
    raise HTTPException(401, "A token is needed: send it as `Authorization: Bearer …`.", {"WWW-Authenticate": "Bearer"})


class Door(APIRoute):
    """A route that knows who asks before FastAPI reads, let alone parses, what they send."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            request.scope["token"] = await authenticated(request)
            return await handle(request)

        return guarded


def check_scope(token: TokenRecord, family: str | None) -> None:
    if family is not None and not token.sees(family):
        raise HTTPException(403, f"This token is not for the family {family!r}.")


def needs(*roles: str) -> Callable[..., Awaitable[TokenRecord]]:
    """A dependency that lets through tokens of any of these roles, and administrators; the route is a `Door`."""

    async def check(
        request: Request,
        given: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],  # for the API's description
        stored: Annotated[str | None, Security(cookie)],
    ) -> TokenRecord:
        token: TokenRecord = request.scope["token"]
        if not any(token.may(role) for role in roles):
            raise HTTPException(403, f"This needs a token with the role {' or '.join(roles)}, not {token.role}.")
        check_scope(token, request.path_params.get("family"))
        return token

    return check


anyone = needs(CONTRIBUTE, CONSUME, ADMIN)
contributor = needs(CONTRIBUTE)
consumer = needs(CONSUME, CONTRIBUTE)
administrator = needs(ADMIN)


async def reader(
    request: Request,
    given: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],
    stored: Annotated[str | None, Security(cookie)],
) -> TokenRecord | None:
    """Who reads bundles; None for anybody, where they are public."""
    try:
        request.scope["token"] = await authenticated(request)
    except HTTPException as error:
        if hub_of(request).settings.public and not given and error.status_code == 401:  # no cookie, or a stale one
            return None
        raise
    return await consumer(request, given, stored)


class Body(NamedTuple):
    """What somebody has sent: in memory only while it is read."""

    file: BinaryIO
    digest: str

    def read(self) -> bytes:
        with reachable():
            self.file.seek(0)
            return self.file.read()


@contextlib.asynccontextmanager
async def body_of(request: Request, token: TokenRecord) -> AsyncIterator[Body]:
    """The raw body, never more of it than this token may send, however many requests it comes with."""
    hub = hub_of(request)
    limit = request.scope[BODY_LIMIT] = token.max_upload or hub.settings.max_upload
    too_large = HTTPException(413, f"The body is larger than the {limit:,} bytes this token may send.")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    size, digest = 0, hashlib.sha256()
    with reachable():
        spool = UploadFile(hub.store.blobs.spool())
    try:
        async for part in request.stream():
            size += len(part)
            hub.gate.hold(token, len(part))
            if size > limit:
                raise too_large
            if hub.gate.holds_too_much(token, limit, hub.settings.max_upload):
                raise HTTPException(429, "Too many uploads at once: try again later.", {"Retry-After": "2"})
            digest.update(part)
            with reachable():
                await spool.write(part)
        if not size:
            raise HTTPException(422, "The body is empty: send the file itself.")
        yield Body(spool.file, digest.hexdigest())
    finally:
        hub.gate.hold(token, -size)
        await spool.close()
