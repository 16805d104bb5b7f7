"""The dashboard, as a browser sees it, and the headers, cookies and files that it comes with."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the hub's dependencies are not installed")
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.access import COOKIE
from mergetta.hub.app import create_app
from mergetta.hub.limits import Gate
from mergetta.hub.protocol import server_options
from mergetta.hub.records import Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.store.schema import experts, families

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs chromium on the PATH and Python's playwright",
)
DOMAINS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur",
    "<b>snow</b>", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
DEVICES = ("camera-north", "camera-south", "dock-3", "forklift-12", "gate-1", "handheld-7")
EVIL = '<img src=x onerror="window.hacked=1"><a href="https://evil.example">&lt;'
FAMILY = "resnet-26@3f9a0c"


def family_file(name: str = FAMILY, layers: int = 10, width: int = 32) -> FamilyFile:
    names = [f"layer{i // 3 + 1}.{i % 3}.bn.{part}" for i in range(layers) for part in ("weight", "bias")]
    base = {each: np.full(width, float(each.endswith("weight")), np.float32) for each in names}
    return FamilyFile(name, base, tuple(names[-4:]), "ResNet-26 with batch norm, CIFAR-10", {"size": 32})


def expert_bytes(file: FamilyFile, domain: str, number: int, method: str = "roid", **change: Any) -> bytes:
    """Experts share a direction, neighbours a little more; `flip`, `length` and `random` make outliers."""
    shared, kin, own = (np.random.default_rng(seed) for seed in (1, 100 + number // 3, 1000 + number))
    groups = {}
    for each, base in file.base.items():
        parts = [rng.normal(size=base.size) for rng in (shared, kin, own)]
        weights = (0.0, 0.0, 1.7) if change.get("random") else (1.0, 0.9, 0.8)
        task = sum(w * part for w, part in zip(weights, parts, strict=True)) * 0.03 * change.get("length", 1.0)
        groups[each] = base + (-task if change.get("flip") else task)
    return Expert(groups, file.family, domain, provenance={"method": method, "samples": 2000 + 137 * number}).to_bytes()


def reports_of(
    device: str, number: int, bundle: str | None, count: int = 40, family: str = FAMILY
) -> list[dict[str, Any]]:
    rng, now, found = np.random.default_rng(number), time.time(), []
    for i in range(count):
        since = i % (count // 2)
        entropy = 0.25 + 0.06 * number + 1.1 * np.exp(-since / 6) + 0.04 * rng.normal()
        found.append({
            "family": family, "device": device, "time": now - 30.0 * (count - i), "bundle": bundle,
            "state": "settled" if since > 14 and number % 2 else "adapting", "batches": 20 * i, "images": 320 * i,
            "steps": 9 * i, "shifts": i // (count // 2), "entropy": float(entropy),
            "loss": float(0.9 * entropy - 0.2), "forwards": 1.0 + 0.5 * float(np.exp(-since / 9)),
        })  # fmt: skip
    return found


@dataclass
class Running:
    """A hub in a thread, with a token of each role."""

    app: FastAPI
    address: str
    tokens: dict[str, str]
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=20)

    @property
    def store(self) -> Any:
        return self.app.state.hub.store


def hub_app(folder: Path, **options: Any) -> tuple[FastAPI, dict[str, str]]:
    app = create_app(HubSettings.in_folder(folder, **{"build_every": 0.2, "open": True, **options}))
    store = app.state.hub.store
    return app, {role: store.create_token(f"the {role}", role)[0] for role in ("admin", "contribute", "consume")}


def serve(folder: Path, **options: Any) -> Running:
    app, tokens = hub_app(folder, **options)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **{**server_options(), "timeout_graceful_shutdown": 1}))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    return Running(app, f"http://127.0.0.1:{listener.getsockname()[1]}", tokens, server, thread)


def furnish(running: Running, evil: bool = True) -> None:
    """Fifteen experts, three outliers (one with a name that is an attack), six devices."""
    import urllib3

    http = urllib3.PoolManager()

    def send(method: str, path: str, role: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {running.tokens[role]}"}
        answer = http.request(method, f"{running.address}/v1/{path}", headers=headers, **body)
        assert answer.status < 300, answer.data
        return answer.json()

    file = family_file()
    send("PUT", f"families/{file.family}", "contribute", body=file.to_bytes())
    upload = [expert_bytes(file, domain, i, "roid" if i % 4 else "deyo") for i, domain in enumerate(DOMAINS)]
    upload.append(expert_bytes(file, "night_shift", 20, flip=True))
    upload.append(expert_bytes(file, "lens_dirt", 21, length=9.0))
    upload.append(expert_bytes(file, EVIL if evil else "unlabelled", 22, random=True))
    for data in upload:
        send("POST", f"families/{file.family}/experts", "contribute", body=data)
    eventually(lambda: up_to_date(running))
    bundle = send("GET", f"families/{file.family}", "admin")["bundle"]
    for i, device in enumerate(DEVICES):
        send("POST", "reports", "consume", json=reports_of(device, i, bundle if i else "0" * 64))


def up_to_date(running: Running) -> bool:
    family = running.store.family(FAMILY)
    return bool(family.built >= family.generation)


def eventually(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


# without a browser


@pytest.fixture(scope="module")
def app_and_tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[FastAPI, dict[str, str]]:
    return hub_app(tmp_path_factory.mktemp("quiet hub"))


@pytest.fixture
def client(app_and_tokens: tuple[FastAPI, dict[str, str]]) -> TestClient:
    return TestClient(app_and_tokens[0], follow_redirects=False)


@pytest.fixture
def tokens(app_and_tokens: tuple[FastAPI, dict[str, str]]) -> dict[str, str]:
    return app_and_tokens[1]


def test_pages_allow_nothing_from_elsewhere(client: TestClient, tokens: dict[str, str]) -> None:
    before = client.get("/")
    client.post("/login", json={"token": tokens["admin"]})
    after = client.get("/")
    assert "Log in" in before.text and "Log out" in after.text
    for answer in (before, after):
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert "unsafe-eval" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"


def test_a_page_holds_no_token(client: TestClient, tokens: dict[str, str]) -> None:
    assert tokens["admin"] not in str(client.post("/login", json={"token": tokens["admin"]}).headers)
    assert tokens["admin"] not in client.get("/").text


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("kind", ["data", "json"])
def test_login_sets_a_cookie_that_scripts_and_other_sites_cannot_use(
    app_and_tokens: tuple[FastAPI, dict[str, str]], scheme: str, kind: str
) -> None:
    app, tokens = app_and_tokens
    client = TestClient(app, f"{scheme}://hub.example", follow_redirects=False)
    answer = client.post("/login", **{kind: {"token": f" {tokens['consume']}\n"}})
    assert answer.status_code == (303 if kind == "data" else 200)
    given = [part.strip().lower() for part in answer.headers["set-cookie"].split(";")]
    assert "httponly" in given and "samesite=strict" in given and "path=/" in given
    assert ("secure" in given) == (scheme == "https")
    assert client.get("/v1/families").status_code == 200
    session = client.cookies[COOKIE]
    client.post("/logout")
    assert client.get("/v1/families").status_code == 401
    client.cookies.set(COOKIE, session)
    assert client.get("/v1/families").status_code == 401  # the session is over, not only the cookie gone


def test_a_wrong_token_is_refused_in_words(client: TestClient) -> None:
    form = client.post("/login", data={"token": "mgt_wrong"})
    assert form.status_code == 401 and "unknown, revoked" in form.text and "set-cookie" not in form.headers
    told = client.post("/login", json={"token": "mgt_wrong"})
    assert told.status_code == 401 and "unknown, revoked" in told.json()["detail"]


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"token": 3}', b'{"token": "\\ud800"}', b"\xff", b"[" * 4000, b"x" * 5000]
)
def test_a_strange_login_is_no_fault(client: TestClient, body: bytes) -> None:
    for kind in ("application/json", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post("/login", content=body, headers={"Content-Type": kind})
        assert 400 <= answer.status_code < 500
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}]
)
def test_other_sites_cannot_log_a_visitor_in_or_out(
    client: TestClient, tokens: dict[str, str], headers: dict[str, str]
) -> None:
    assert client.post("/login", data={"token": tokens["admin"]}, headers=headers).status_code == 403
    assert client.post("/logout", headers=headers).status_code == 403
    own = {"Origin": "http://testserver"}
    assert client.post("/login", data={"token": tokens["admin"]}, headers=own).status_code == 303


def test_a_revoked_token_leads_back_to_the_login(app_and_tokens: tuple[FastAPI, dict[str, str]]) -> None:
    app, _ = app_and_tokens
    secret, token = app.state.hub.store.create_token("short-lived", "consume")
    client = TestClient(app)
    assert "Log out" in client.post("/login", data={"token": secret}).text
    app.state.hub.store.revoke_token(token.id)
    app.state.hub.gate = Gate()
    assert "Log in" in client.get("/").text


def test_the_name_of_a_token_is_text(app_and_tokens: tuple[FastAPI, dict[str, str]]) -> None:
    app, _ = app_and_tokens
    secret, _ = app.state.hub.store.create_token('"><script>alert(1)</script>', "admin")
    client = TestClient(app)
    client.post("/login", json={"token": secret})
    assert "<script>alert" not in client.get("/").text


def test_plotly_is_served_once_per_version(client: TestClient, tokens: dict[str, str]) -> None:
    client.post("/login", json={"token": tokens["admin"]})
    assert 'data-plotly="static/plotly.min.js?v=' in client.get("/").text
    answer = client.get("/static/plotly.min.js", headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip" and "plotly.js v" in answer.text[:200]
    assert int(answer.headers["content-length"]) < 2_000_000
    assert "immutable" in answer.headers["cache-control"]
    again = client.get("/static/plotly.min.js", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert client.get("/static/plotly.min.js", headers={"Accept-Encoding": "identity"}).text == answer.text


def test_files_are_served_by_name_only(client: TestClient) -> None:
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert client.get(f"/static/{name}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    for name in ("none.js", "..%2f__init__.py", "%2e%2e/assets.py", "__init__.py"):
        assert client.get(f"/static/{name}").status_code == 404


def test_the_dashboard_is_not_part_of_the_documented_api(client: TestClient) -> None:
    assert all(path.startswith("/v1/") for path in client.get("/openapi.json").json()["paths"])


def test_scripts_never_write_markup() -> None:
    from mergetta.hub.dashboard.assets import own_assets

    for name, asset in own_assets().items():
        text = asset.data.decode()
        assert not any(word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(")), name
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name


# with a browser


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = serve(tmp_path_factory.mktemp("hub"))
    furnish(found)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Any:
    """One for all tests, so that plotly is fetched and compiled once."""
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    made.set_default_timeout(20_000)
    return made


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    context.clear_cookies()
    opened = context.new_page()
    opened.complaints = []
    opened.on("console", lambda message: opened.complaints.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    yield opened
    opened.close()


def log_in(page: Any, hub: Running, role: str) -> None:
    session = hub.store.open_session(hub.store.find_token(hub.tokens[role]).id)
    page.context.add_cookies([{"name": COOKIE, "value": session, "url": hub.address}])


def enter(page: Any, hub: Running, role: str = "admin", section: str = "overview", refresh: float = 3600) -> None:
    """A section of the first family, or, as `section/family`, of another one."""
    log_in(page, hub, role)
    page.goto(f"{hub.address}/?refresh={refresh}#/{section}")
    page.wait_for_selector(f"#{section.partition('/')[0]}:visible")


def charts(page: Any, section: str) -> dict[str, list[dict[str, Any]]]:
    """What plotly has drawn, by chart."""
    drawn = f"[...document.querySelectorAll('#{section} .chart')].every((each) => each.mark)"
    eventually(lambda: page.evaluate(drawn))
    read = "([...divs]) => Object.fromEntries(divs.map((each) => [each.id, each.data.map((t) => ({...t}))]))"
    return dict(page.eval_on_selector_all(f"#{section} .chart", read))


@needs_browser
def test_log_in_and_out(page: Any, running: Running) -> None:
    page.goto(running.address)
    page.fill("#token", "mgt_wrong")
    page.click("text=Log in")
    assert "unknown, revoked" in page.inner_text("#problem")
    page.fill("#token", running.tokens["admin"])
    page.click("text=Log in")
    page.wait_for_selector("#families tbody tr")
    page.click("text=Log out")
    page.wait_for_selector("#token")
    assert not page.context.cookies()


@needs_browser
def test_a_token_in_the_fragment_logs_in_and_vanishes(page: Any, running: Running) -> None:
    page.goto(f"{running.address}/#token={running.tokens['consume']}")
    page.wait_for_selector("#families tbody tr")
    assert running.tokens["consume"] not in page.url
    assert page.inner_text(".who .tag") == "consume"
    assert not page.complaints


@needs_browser
def test_every_section_shows_its_data(page: Any, running: Running) -> None:
    enter(page, running)
    drawn = charts(page, "overview")
    assert FAMILY in page.inner_text("#families") and "to accept or reject" in page.inner_text("#attention")
    for section in ("experts", "bundle", "devices"):
        page.click(f"nav a[data-section={section}]")
        page.wait_for_selector(f"#{section}:visible")
        drawn |= charts(page, section)
    alive = [expert for expert in running.store.experts(FAMILY) if expert.state != "retired"]
    assert len(drawn["similarity"][0]["z"]) == len(alive) >= 17
    assert sum(len(trace["x"]) for trace in drawn["ranks"]) == sum(len(trace["y"]) for trace in drawn["energy"]) == 20
    assert [trace["name"] for trace in drawn["ranks"]] == ["moves", "frozen"]
    for name in ("history", "overview-history"):
        assert len(drawn[name]) == 2 and all(len(trace["x"]) >= 1 for trace in drawn[name])
    for name in ("entropy", "loss", "overview-entropy"):
        assert [trace["name"] for trace in drawn[name]] == list(DEVICES)
        assert all(len(trace["y"]) >= 40 for trace in drawn[name])
    assert page.locator("#device-table tbody tr").count() == len(DEVICES)
    assert page.locator("#expert-table tbody tr").count() == len(running.store.experts(FAMILY))
    assert page.locator('[data-title*="Share"], [data-title*="loud"]').count() == 0, "plotly would send data away"
    assert not page.complaints


@needs_browser
def test_charts_follow_the_colour_scheme(page: Any, running: Running) -> None:
    def colour() -> Any:
        return charts(page, "bundle")["ranks"][0]["marker"]["color"]

    page.emulate_media(color_scheme="light")
    enter(page, running, section="bundle")
    light = colour()
    page.emulate_media(color_scheme="dark")
    eventually(lambda: colour() != light)
    assert not page.complaints


@needs_browser
def test_tables_work_without_charts(page: Any, running: Running) -> None:
    page.route("**/plotly*", lambda route: route.abort())
    enter(page, running, section="experts")
    page.wait_for_selector("text=The charts could not be loaded")
    page.select_option("#expert-state", "quarantined")
    states = page.locator("#expert-table tbody td:nth-child(2)").all_inner_texts()
    assert states and all("quarantined" in state for state in states)


@needs_browser
def test_devices_are_filtered_by_name(page: Any, running: Running) -> None:
    enter(page, running, section="devices")
    page.fill("#device-filter", "CAMERA")
    eventually(lambda: page.locator("#device-table tbody tr").count() == 2)
    eventually(lambda: [trace["name"] for trace in charts(page, "devices")["loss"]] == list(DEVICES[:2]))


@needs_browser
def test_zoom_survives_new_data(page: Any, running: Running) -> None:
    enter(page, running, section="devices", refresh=0.5)
    before = len(charts(page, "devices")["entropy"][0]["x"])
    page.evaluate("Plotly.relayout('entropy', {'yaxis.range': [0.5, 0.75]})")
    report = reports_of(DEVICES[0], 0, None, count=2)[-1]
    TestClient(running.app).post(
        "/v1/reports", json=[report], headers={"Authorization": f"Bearer {running.tokens['consume']}"}
    ).raise_for_status()
    eventually(lambda: len(charts(page, "devices")["entropy"][0]["x"]) > before)
    assert page.evaluate("document.getElementById('entropy').layout.yaxis.range") == [0.5, 0.75]


@needs_browser
def test_an_accepted_expert_becomes_part_of_the_bundle(page: Any, running: Running) -> None:
    merged = running.store.history(FAMILY)[-1].experts
    enter(page, running, section="quarantine", refresh=0.5)
    page.click("[aria-label='Accept night_shift']")
    page.click("dialog >> text=Cancel")
    page.click("[aria-label='Accept night_shift']")
    page.click("dialog button.primary")
    page.wait_for_selector("text=night_shift is accepted")
    page.wait_for_selector("[aria-label='Accept night_shift']", state="detached")
    eventually(lambda: running.store.history(FAMILY)[-1].experts == merged + 1)
    page.click("nav a[data-section=bundle]")
    page.wait_for_selector(f"#bundle-tiles dd:text-is('{merged + 1}')")
    page.wait_for_selector("#member-table td:text-is('night_shift')")
    accepted = next(expert for expert in running.store.experts(FAMILY) if expert.domain == "night_shift")
    assert accepted.decided and "accepted by the admin" in accepted.reason
    assert not page.complaints


@needs_browser
def test_rejecting_asks_first(page: Any, running: Running) -> None:
    def state() -> str:
        return str(next(expert.state for expert in running.store.experts(FAMILY) if expert.domain == "lens_dirt"))

    enter(page, running, section="quarantine")
    page.click("[aria-label='Reject lens_dirt']")
    page.click("dialog >> text=Cancel")
    assert state() == "quarantined"
    page.click("[aria-label='Reject lens_dirt']")
    page.click("dialog button.danger")
    page.wait_for_selector("text=lens_dirt is rejected")
    assert state() == "retired"


@needs_browser
def test_a_refused_decision_is_explained(page: Any, running: Running) -> None:
    file = family_file()
    data = expert_bytes(file, "too_late", 40, flip=True)
    expert, _ = running.store.add_expert(FAMILY, data, "somebody")
    running.store.decide(expert.id, "quarantined", "")
    enter(page, running, section="quarantine")
    running.store.decide(expert.id, "retired", "")
    page.click("[aria-label='Accept too_late']")
    page.click("#confirm-yes")
    page.wait_for_selector("#toast:has-text('A retired expert stays retired')")
    page.wait_for_selector("[aria-label='Accept too_late']", state="detached")


@needs_browser
def test_several_active_experts_are_pulled_out_at_once(page: Any, running: Running) -> None:
    enter(page, running, section="experts")
    assert "the contribute" in page.inner_text("#contributor-table")
    assert page.is_disabled("#expert-actions button >> nth=1")
    for domain in ("fog", "frost"):
        page.check(f"[aria-label='Choose {domain}']")
    assert "2 experts chosen" in page.inner_text("#expert-actions")
    page.click("#expert-actions >> text=Keep out")
    assert "2 experts" in page.inner_text("#confirm-what")
    page.click("#confirm-yes")
    page.wait_for_selector("text=2 experts are kept out")
    states = {expert.domain: expert.state for expert in running.store.experts(FAMILY)}
    assert states["fog"] == states["frost"] == "quarantined"
    page.click("nav a[data-section=log]")
    page.wait_for_selector("#log-table td:text-is('quarantine expert')")
    assert "kept out by the admin" in page.inner_text("#log-table")
    for expert in running.store.experts(FAMILY):
        if expert.domain in ("fog", "frost"):
            running.store.decide(expert.id, "active", "")
    assert not page.complaints


@needs_browser
def test_trouble_is_not_called_well(page: Any, running: Running) -> None:
    family = "troubled@1"
    running.store.put_family(family_file(family).to_bytes(), family)
    data = expert_bytes(family_file(family), "fog", 0)
    running.store.add_expert(family, data, "t")
    eventually(lambda: (found := running.store.family(family)).built >= found.generation)
    bundle = running.store.current(family, Variant()).id
    quiet = [reports_of(device, 0, bundle, 2, family)[-1] for device in DEVICES]

    def attention(*changes: dict[str, Any]) -> str:
        reports = [{**report, **change} for report, change in zip(quiet, [*changes, *[{}] * 9], strict=False)]
        running.store.add_reports(reports, "t")
        enter(page, running, section=f"overview/{family}")
        page.reload()
        page.wait_for_selector("#attention li")
        return str(page.inner_text("#attention"))

    assert "No build and no device reports trouble" in attention()
    told = attention({"fallbacks": 2}, {"refused": 1}, {"bad": 3}, {"entropy": 9.0})
    for words in ("fell back 2 times", "refused 1 bundle", "could not read 3 images", "far less certain"):
        assert words in told
    assert "reports trouble" not in told
    with running.store.database.write() as connection:  # as after a minute of builds that fail
        connection.execute(
            families.update().where(families.c.id == family).values(built=0, lease_until=time.time() + 15)
        )
        connection.execute(families.update().where(families.c.id == family).values(lease_owner="another"))
        connection.execute(experts.update().where(experts.c.family == family).values(changed=time.time() - 600))
    assert "No bundle with the latest experts for 10 min" in attention()
    running.store.delete_family(family)


@needs_browser
def test_only_administrators_may_decide(page: Any, running: Running) -> None:
    enter(page, running, role="contribute", section="quarantine")
    buttons = page.locator("#queue button")
    assert buttons.count() >= 2 and all(button.is_disabled() for button in buttons.all())
    assert "Only an administrator" in page.inner_text("#only-admins")


@needs_browser
def test_consumers_see_no_uploads(page: Any, running: Running) -> None:
    enter(page, running, role="consume")
    page.wait_for_selector("#attention li")
    shown = [link.get_attribute("data-section") for link in page.locator("nav a:visible").all()]
    assert shown == ["overview", "bundle", "devices"] and not page.complaints


@needs_browser
def test_experts_wait_for_images_to_be_tried_on(page: Any, tmp_path: Path) -> None:
    hub = serve(tmp_path, open=False)
    hub.store.put_family(family_file().to_bytes(), FAMILY)
    token = hub.store.create_token("approved", "contribute", approved=True)[1].id
    hub.store.add_expert(FAMILY, expert_bytes(family_file(), "fog", 0), token)
    enter(page, hub, section="overview", refresh=0.5)
    page.wait_for_selector("#tiles:has-text('1 waiting for probe images')")
    page.wait_for_selector("#attention:has-text('mergetta hub probe')")
    page.click("nav a[data-section=experts]")
    page.wait_for_selector("#expert-table:has-text('waits for probe images')")
    assert not page.complaints
    hub.stop()


@needs_browser
def test_uploads_of_new_tokens_wait_for_approval(page: Any, tmp_path: Path) -> None:
    hub = serve(tmp_path, open=False, probe=False)
    hub.store.put_family(family_file().to_bytes(), FAMILY)
    token = hub.store.find_token(hub.tokens["contribute"]).id
    hub.store.add_expert(FAMILY, expert_bytes(family_file(), "fog", 0), token)
    enter(page, hub, section="experts", refresh=0.5)
    page.wait_for_selector(f"#expert-table:has-text('mergetta hub token approve {token}')")
    page.click("nav a[data-section=overview]")
    page.wait_for_selector("#tiles:has-text('1 waiting for approval')")
    page.click("nav a[data-section=experts]")
    page.click("[aria-label='Approve the contribute']")
    page.click("dialog >> text=Cancel")
    assert hub.store.unapproved() >= {token}
    page.click("[aria-label='Approve the contribute']")
    page.click("dialog button.primary")
    page.wait_for_selector("text=the contribute is approved")
    page.wait_for_selector("[aria-label='Approve the contribute']", state="detached")
    eventually(lambda: hub.store.counts(FAMILY) == {"active": 1})
    actor = hub.store.find_token(hub.tokens["admin"]).id
    assert [(e.actor, e.subject) for e in hub.store.audit() if e.action == "approve token"] == [(actor, token)]
    assert not page.complaints
    hub.stop()


@needs_browser
def test_names_from_outside_stay_text(page: Any, running: Running) -> None:
    enter(page, running, section="experts")
    charts(page, "experts")
    assert "<b>snow</b>" in page.locator("#similarity .yaxislayer-above text").all_text_contents()
    assert EVIL in page.locator("#expert-table td.name").all_inner_texts()
    page.click("nav a[data-section=quarantine]")
    page.wait_for_selector("#queue h3")
    assert EVIL in page.locator("#queue h3").all_inner_texts()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img").count() == 0 and page.locator("[*|href*='evil']").count() == 0
    assert not page.complaints


@needs_browser
def test_it_fits_on_a_phone(page: Any, running: Running) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for section in ("overview", "experts", "bundle", "devices", "quarantine", "log"):
        enter(page, running, section=section)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, f"{section} is wider than the screen"


@needs_browser
def test_an_empty_hub_says_what_to_do_and_a_stopped_one_that_it_is_gone(page: Any, tmp_path: Path) -> None:
    hub = serve(tmp_path)
    log_in(page, hub, "admin")
    page.goto(f"{hub.address}/?refresh=0.5")
    page.wait_for_selector("#welcome:visible")
    assert f"--hub {hub.address}" in page.inner_text("#welcome")
    hub.store.put_family(family_file().to_bytes(), FAMILY)
    for section, words in (("experts", "mergetta adapt"), ("bundle", "mergetta run"), ("devices", "mergetta run")):
        page.click(f"nav a[data-section={section}]")
        page.wait_for_selector(f"#{section} .empty:visible")
        assert words in page.inner_text(f"#{section} .empty")
    page.click("nav a[data-section=quarantine]")
    page.wait_for_selector("text=Nothing is waiting")
    assert not page.complaints
    hub.stop()
    page.wait_for_selector("#banner:has-text('The hub cannot be reached')")
    assert page.inner_text("#status") == "Not connected"
    assert page.is_visible("#quarantine"), "what was there stays"
