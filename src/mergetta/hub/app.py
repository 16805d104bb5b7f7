"""The hub as an ASGI application: routes, and errors as one sentence."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

import mergetta
from mergetta.errors import MergettaError
from mergetta.hub import dashboard
from mergetta.hub.api import ROUTERS
from mergetta.hub.frame import Frame
from mergetta.hub.metrics import Metrics
from mergetta.hub.settings import HubSettings
from mergetta.hub.state import Hub
from mergetta.hub.store.storage import Conflict, Damaged, NotThere, Refused, Unavailable

log = logging.getLogger("mergetta.hub")
STATUS = {Refused: 403, NotThere: 404, Conflict: 409, Damaged: 503, Unavailable: 503}
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
DESCRIPTION = """Strong devices upload experts, weak devices fetch bundles, people see what is happening.

Send a token as `Authorization: Bearer …`. Errors are `{"detail": "one sentence"}`."""


def create_app(settings: HubSettings) -> FastAPI:
    hub = Hub(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        hub.builder.start()
        yield
        hub.close()

    app = FastAPI(
        title="mergetta hub",
        version=mergetta.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere: they fail offline, and could use our cookie
        redoc_url=None,
    )
    app.state.hub = hub
    metrics = Metrics(hub.builder)
    for router in ROUTERS:
        app.include_router(router)
    dashboard.add_to(app)

    @app.get("/metrics", include_in_schema=False)
    def get_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    add_error_handlers(app)
    app.add_middleware(Frame, metrics=metrics)
    return app


def from_environment() -> FastAPI:
    """For uvicorn's worker processes."""
    return create_app(HubSettings.from_environment())


def problem(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": text}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(MergettaError)
    async def unusable(request: Request, error: MergettaError) -> JSONResponse:
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
        return problem(status, str(error), {"Retry-After": "2"} if status == 503 else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return problem(422, f"{' → '.join(map(str, first['loc']))}: {first['msg']}")

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> JSONResponse:
        return problem(400, "The client has left.")  # for metrics and the access log: nobody hears it

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of one route only
            scopes = {method: {**request.scope, "method": method} for method in METHODS}
            fits = [m for m, scope in scopes.items() if any(r.matches(scope)[0] is Match.FULL for r in app.routes)]
            headers["Allow"] = ", ".join(fits)
        return problem(error.status_code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        log.exception("a fault of the hub", exc_info=error)
        return problem(500, "The hub has a fault; its log says more.")
