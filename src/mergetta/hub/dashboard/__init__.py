"""The dashboard: pages that the hub serves itself, without a build step and without the internet.

The pages hold no data. Their scripts ask the same /v1 that everybody uses, with a session in a cookie that scripts
cannot read; the token itself is sent once, to log in.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

import mergetta
from mergetta.errors import MergettaError
from mergetta.hub.access import COOKIE, hub_of, identify
from mergetta.hub.dashboard.assets import PLOTLY, own_assets, plotly, plotly_version
from mergetta.hub.records import TokenRecord

LONGEST_LOGIN = 4096
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # plotly styles its drawings in place
        "img-src 'self' data: blob:",  # plotly's heatmaps, and saving a chart as a picture
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
pages = Environment(loader=PackageLoader(__name__), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
routes = APIRouter(include_in_schema=False)


def add_to(app: FastAPI) -> None:
    app.include_router(routes)


def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    text = pages.get_template(name).render(version=mergetta.__version__, **values)
    return HTMLResponse(text, status, PAGE_HEADERS)


@routes.get("/")
async def home(request: Request) -> Response:
    secret = request.cookies.get(COOKIE)
    if not secret:
        return page("login.html", problem="")
    token, status, problem = await recognise(request, secret, session=True)
    if token is None:
        return page("login.html", 200 if status == 401 else status, problem="" if status == 401 else problem)
    return page("dashboard.html", token=token, plotly=f"static/{PLOTLY}?v={plotly_version()}")


@routes.get("/login")
async def back() -> Response:
    """Where a failed login leaves the address bar."""
    return RedirectResponse("./", 303)


@routes.post("/login")
async def login(request: Request) -> Response:
    """Checks a token and opens a session, which a cookie keeps: a form for people, JSON for scripts."""
    refuse_other_sites(request)
    in_json = request.headers.get("content-type", "").startswith("application/json")
    secret = await given_token(request, in_json)
    token, status, problem = await recognise(request, secret)
    if token is None:
        return JSONResponse({"detail": problem}, status) if in_json else page("login.html", status, problem=problem)
    done = JSONResponse({"name": token.name, "role": token.role}) if in_json else RedirectResponse("./", 303)
    session = await run_in_threadpool(hub_of(request).store.open_session, token.id)
    done.set_cookie(COOKIE, session, **cookie_flags(request))
    return done


@routes.post("/logout")
async def logout(request: Request) -> Response:
    refuse_other_sites(request)
    hub, secret = hub_of(request), request.cookies.get(COOKIE)
    if secret:
        await run_in_threadpool(hub.store.close_session, secret)
        hub.gate.forget_session(secret)
    done = RedirectResponse("./", 303)
    done.delete_cookie(COOKIE, **cookie_flags(request))
    return done


@routes.get(f"/static/{PLOTLY}")
def get_plotly(request: Request) -> Response:
    return plotly().answer(request)


@routes.get("/static/{name}")
def get_asset(name: str, request: Request) -> Response:
    asset = own_assets().get(name)
    if asset is None:
        raise HTTPException(404, "There is no such file.")
    return asset.answer(request)


def cookie_flags(request: Request) -> dict[str, Any]:
    return {"httponly": True, "samesite": "strict", "secure": request.url.scheme == "https"}


async def recognise(request: Request, secret: str, session: bool = False) -> tuple[TokenRecord | None, int, str]:
    """The token, or a status and a sentence for people."""
    try:
        return await identify(hub_of(request), secret, session), 200, ""
    except HTTPException as error:
        return None, error.status_code, str(error.detail)
    except MergettaError as error:
        return None, 503, str(error)


async def given_token(request: Request, in_json: bool) -> str:
    """From a short body, whatever is in it."""
    body = await short_body(request)
    try:
        given = json.loads(body).get("token") if in_json else parse_qs(body.decode()).get("token", [""])[0]
    except (ValueError, AttributeError, RecursionError):
        given = None
    if not isinstance(given, str):
        raise HTTPException(422, 'Send {"token": "…"} as JSON, or a form with the field token.')
    return given.strip().encode("ascii", "replace").decode()


async def short_body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_LOGIN:
            raise HTTPException(413, "That is too long for a token.")
    return body


def refuse_other_sites(request: Request) -> None:
    """No other site may log a visitor in or out: browsers say where a POST comes from."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    try:
        foreign = (
            site not in ("same-origin", "none") if site else origin and urlsplit(origin).netloc != request.url.netloc
        )
    except ValueError:
        foreign = True
    if foreign:
        raise HTTPException(403, "Log in on the hub's own page.")
