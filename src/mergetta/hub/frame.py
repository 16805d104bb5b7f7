"""Around every request: its body is bounded in size and time, its outcome is counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from mergetta.hub.metrics import Metrics

access = logging.getLogger("mergetta.hub.access")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
BODY_LIMIT = "mergetta.body_limit"
"""In a request's scope: bytes that its body may have, set where larger ones than JSON are expected."""
LARGEST_JSON = 2**20
BODY_SECONDS = 20.0
"""For receiving a body, and a second more for every `SLOWEST` bytes of it."""
SLOWEST = 16 * 2**10
SAFE = (b"x-content-type-options", b"nosniff")
ONLY_TLS = (b"strict-transport-security", b"max-age=31536000")


class Frame:
    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [SAFE, ONLY_TLS] if scope["scheme"] == "https" else [SAFE]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self.app(scope, bounded(scope, receive), noted)
        finally:
            seconds = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.observe(scope["method"], route, status, seconds)
            if access.isEnabledFor(logging.INFO):
                client, token = (scope.get("client") or ("-",))[0], getattr(scope.get("token"), "id", "-")
                told = (client, token, scope["method"], scope["path"], status, 1000 * seconds)
                access.info("%s %s %s %r %d %.1f ms", *told)


def bounded(scope: Message, receive: Receive) -> Receive:
    """The same, but 413 for a body that is too large and 408 for one that does not come."""
    size, began, whole = 0, 0.0, False

    async def limited() -> Message:
        nonlocal size, began, whole
        if whole:  # from here on it waits for the client to leave
            return await receive()
        began = began or time.monotonic()
        try:
            left = began + BODY_SECONDS + size / SLOWEST - time.monotonic()
            message = await asyncio.wait_for(receive(), max(0.0, left))
        except TimeoutError:
            raise HTTPException(408, "The body takes too long.", {"Connection": "close"}) from None
        size += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        limit = scope.get(BODY_LIMIT, LARGEST_JSON)
        if size > limit:
            raise HTTPException(413, f"The body is larger than the {limit:,} bytes that are allowed.")
        return message

    return limited
