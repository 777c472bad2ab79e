"""The page for operators in Chromium: its key, what it shows, when it asks, and for whom it can be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
import uvloop
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from fovea.http.page import FOLDER
from fovea.server.app import create_app
from fovea.server.run import serving
from fovea.server.settings import ServerSettings
from tests.page.support import WIDE, Watch
from tests.server.scripted import talker

LIVE = "**/admin/live"
KEY, WRONG = "admin-key", "wrong-key"
HOSTILE = '<img src=x onerror="document.title=1">'
Json = dict[str, Any]
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SLOW: Json = {
    "time": "2026-01-02T03:04:05.678+00:00", "request_id": "r1", "trace_id": "ab" * 16,
    "route": "/v1/chat/completions", "status": 200, "model": "m", "caller": "alice", "seconds": 4.0,
    "ttft_seconds": 3.1, "stages": {"decode": 1.0, "queue": 2.0, "encode": 1.0}, "prompt_tokens": 9,
    "cached_tokens": 0, "completion_tokens": 8, "images": [{"width": 640, "height": 480, "tokens": 300}],
    "reasons": ["queue took 2 s", "<b>encode took 1 s</b>"],
}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server with keys that has answered a request."""
    settings = ServerSettings(api_keys=("user-key",), admin_keys=(KEY,))
    with serving(create_app(talker("many words"), settings), uvloop.new_event_loop) as url:
        ask = {"messages": [{"role": "user", "content": "private question"}]}
        httpx.post(
            f"{url}/v1/chat/completions", json=ask, headers={"authorization": "Bearer user-key"}
        ).raise_for_status()
        yield url


@pytest.fixture(scope="module")
def real(url: str) -> Json:
    """A snapshot of that server."""
    answer = httpx.get(f"{url}/admin/live", headers={"authorization": f"Bearer {KEY}"})
    return dict(answer.raise_for_status().json())


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """An empty tab that is watched. Requests that fail are part of these tests, other errors are not."""
    with browser.new_context(base_url=url, viewport=WIDE) as context:
        watch = Watch(context, url)
        watch.expected = ("Failed to load resource",)
        page = context.new_page()
        yield page
        watch.check(page)


class Answers:
    """Answers of /admin/live that a test chooses.

    snapshot: the next answer; None: the server does not answer.
    count: how often the page has asked.
    """

    def __init__(self, page: Page, snapshot: Json) -> None:
        self.snapshot: Json | None = snapshot
        self.count = 0
        page.route(LIVE, self._answer)

    def change(self, *path: str, value: Any) -> None:
        """Change one value of the snapshot. path: the keys that lead to it."""
        assert self.snapshot is not None
        inner = self.snapshot
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    def advance(self, seconds: float) -> None:
        """Let the server's clock go on, so that the next snapshot is another point of the charts."""
        assert self.snapshot is not None
        self.snapshot["time"] += seconds
        self.snapshot["uptime_seconds"] += seconds

    def _answer(self, route: Route) -> None:
        self.count += 1
        if self.snapshot is None:
            route.abort()
        else:
            self.advance(1)
            route.fulfill(json=self.snapshot)


@pytest.fixture
def answers(page: Page, real: Json) -> Answers:
    """Answers for a page whose timers only a test moves: `page.clock.run_for`."""
    page.clock.install(time=0)
    page.clock.pause_at(1)
    return Answers(page, json.loads(json.dumps(real)))


def show(page: Page) -> None:
    """Open the page, and wait until it shows its first snapshot."""
    page.goto("/admin")
    expect(page.locator("#board")).to_be_visible()


def tick(page: Page, answers: Answers, times: int = 1) -> None:
    """Let the page ask again, and wait until it has shown the answer."""
    for _ in range(times):
        with page.expect_event("requestfinished", lambda request: request.url.endswith("/admin/live")):
            page.clock.run_for(1000)


def cells(page: Page, table: str) -> list[list[str]]:
    rows: list[list[str]] = page.locator(f"#{table} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return rows


def test_the_page_is_open_and_its_figures_are_not(url: str) -> None:
    page = httpx.get(f"{url}/admin")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(f"{url}/admin/live").status_code == 401
    assert httpx.get(f"{url}/admin/caches").status_code == 401


def test_the_key_stays_in_the_tab(page: Page, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto("/admin")
    field = page.get_by_label("Key", exact=True)
    expect(field).to_be_focused()
    field.fill(WRONG)
    field.press("Enter")
    expect(page.locator("#key-dialog")).to_contain_text("the admin key is not valid here")
    field.fill(KEY)
    field.press("Enter")
    expect(page.locator("#state-text")).to_have_text("ready")
    page.reload()
    expect(page.locator("#state-text")).to_have_text("ready")
    stored = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
    assert stored == [{"fovea-admin-key": KEY}, {}, ""]
    assert all(KEY not in address and address.startswith(f"{url}/") for address in asked)
    page.get_by_role("button", name="Forget key").click()
    expect(page.locator("#state-text")).to_have_text("locked")
    expect(page.locator("#board")).to_be_hidden()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Enter the key")).to_be_visible()


def test_it_shows_the_snapshot_of_a_real_server(page: Page, real: Json) -> None:
    page.add_init_script(f"sessionStorage.setItem('fovea-admin-key', '{KEY}')")
    show(page)
    assert page.locator("#model").inner_text() == real["engine"]["model"]
    (tenant,) = real["tenants"]["rows"]
    assert cells(page, "tenants") == [
        ["api-key:1", "0", "1", "0", "0", str(tenant["prompt_tokens"]), "0",
         str(tenant["completion_tokens"]), "100 %"]
    ]  # fmt: skip
    assert [row[0].split("\n")[0] for row in cells(page, "caches")] == [
        row["title"] for row in real["caches"]
    ]
    expect(page.locator("#slow")).to_be_hidden()
    expect(page.get_by_text("No request was slow.")).to_be_visible()
    assert "private question" not in page.content()


def test_rows_are_text_and_stay_the_same_elements(page: Page, answers: Answers) -> None:
    """A client chooses its request id, and an operator the names of keys: neither becomes markup."""
    row = {"number": 1, "id": HOSTILE, "caller": HOSTILE, "stage": "waiting", "seconds": 1.5, "images": 2,
           "choices": 1, "tokens": 0}  # fmt: skip
    answers.change("requests", value={"total": 1, "rows": [row]})
    show(page)
    assert cells(page, "requests") == [[HOSTILE, HOSTILE, "waiting", "1.50 s", "2", "1", "0"]]
    assert page.locator("table img").count() == 0
    page.evaluate("document.querySelector('#requests tbody tr').dataset.mark = 'kept'")
    row |= {"stage": "generating", "tokens": 12345}
    tick(page, answers)
    expect(page.locator("#requests tbody tr[data-mark=kept]")).to_contain_text("12,345")
    answers.change("requests", value={"total": 0, "rows": []})
    tick(page, answers)
    expect(page.get_by_text("No request waits or runs.")).to_be_visible()
    assert page.title() == "Fovea admin"


def test_a_slow_request_shows_stages_images_and_reasons(page: Page, answers: Answers) -> None:
    answers.change("slow", value=[SLOW])
    show(page)
    ((arrived, *times, stages, reasons, images),) = cells(page, "slow")
    assert arrived.split("\n")[1:] == ["/v1/chat/completions · 200", f"trace {'ab' * 16}"]
    assert times == ["alice", "4.00 s", "3.10 s"]
    assert stages.strip() == "queue 2.00 s, encode 1.00 s, decode 1.00 s"
    assert reasons == "queue took 2 s\n<b>encode took 1 s</b>"
    assert images == "640×480 (300 tokens)"
    widths = page.locator("#slow .parts .fill").evaluate_all("parts => parts.map(part => part.style.width)")
    answers.change("slow", value=[SLOW | {"request_id": f"r{number}"} for number in range(25)])
    tick(page, answers)
    expect(page.locator("#slow tbody tr")).to_have_count(8)
    page.get_by_role("button", name="Show all 25").press("Enter")
    expect(page.locator("#slow tbody tr")).to_have_count(25)
    assert widths == ["50%", "25%", "25%"], "queue, encode, decode: in the order of the stages"


def test_it_asks_once_a_second_and_not_while_it_is_hidden(page: Page, answers: Answers) -> None:
    show(page)
    before = answers.count
    tick(page, answers, times=5)
    assert answers.count == before + 5
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => window.away });
        window.away = true;
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    page.clock.run_for(30_000)
    assert answers.count == before + 5
    with page.expect_event("requestfinished"):
        page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    assert answers.count == before + 6
    page.get_by_role("button", name="Pause").press("Enter")
    page.clock.run_for(30_000)
    assert answers.count == before + 6
    expect(page.locator("#state-text")).to_have_text("paused")


def test_a_server_that_accepts_nothing(page: Page, answers: Answers) -> None:
    show(page)
    for status, notice in (
        ("loading", "The model is still loading."),
        ("draining", "The server is draining"),
        ("stopped", "The engine has stopped."),
    ):
        answers.change("engine", "status", value=status)
        tick(page, answers)
        expect(page.locator("#state-text")).to_have_text(status)
        expect(page.get_by_role("status")).to_contain_text(notice)
        assert page.title() == f"{status} · Fovea admin"
    page.unroute(LIVE)
    page.route(LIVE, lambda route: route.fulfill(status=500, json={"error": {"message": "a defect"}}))
    tick(page, answers)
    expect(page.get_by_role("status")).to_contain_text("The server answers with an error: a defect.")


def test_a_server_that_does_not_answer(page: Page, answers: Answers) -> None:
    """It is asked less and less often, at least every ten seconds, and the page recovers by itself."""
    show(page)
    snapshot, answers.snapshot = answers.snapshot, None
    with page.expect_event("requestfailed"):
        page.clock.run_for(1000)
    expect(page.get_by_role("status")).to_contain_text("The server has not answered since")
    expect(page.locator("#board")).to_have_class("stale")
    for wait in (2000, 4000, 8000, 10_000, 10_000):
        before = answers.count
        page.clock.run_for(wait - 1)
        assert answers.count == before
        with page.expect_event("requestfailed"):
            page.clock.run_for(1)
    answers.snapshot = snapshot
    page.clock.run_for(10_000)
    expect(page.locator("#state-text")).to_have_text("ready")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#board")).not_to_have_class("stale")


def test_rates_come_from_two_snapshots(page: Page, answers: Answers) -> None:
    show(page)
    for running, tokens in ((3, 40), (5, 100)):
        answers.change("queue", "running", value=running)
        answers.change("counters", "generated_tokens", value=tokens)
        tick(page, answers)
    label = page.locator("#chart-queue svg")
    expect(label).to_have_attribute(
        "aria-label", "Queue, last 5 minutes. Now: running 5, waiting 0, loading images 0."
    )
    expect(page.locator("#chart-tokens li b").first).to_have_text("60")
    assert page.locator("#chart-queue path.line").first.get_attribute("d") != ""


def test_history_has_five_minutes_gaps_and_restarts(page: Page, real: Json) -> None:
    page.goto("/admin")
    found = page.evaluate(
        """async (real) => {
            const { History } = await import("/ui/admin-history.js");
            const { runs, niceMaximum } = await import("/ui/admin-charts.js");
            const history = new History();
            const at = (time, uptime, tokens) => {
                const copy = structuredClone(real);
                copy.time = time;
                copy.uptime_seconds = uptime;
                copy.counters.generated_tokens = tokens;
                return history.add(copy).values.generated;
            };
            const rates = [at(1000, 100, 50), at(1002, 102, 70), at(1003, 1, 5), at(1010, 8, 75)];
            const split = runs(history.points, "running").map((run) => run.length);
            at(1000 + 302, 300, 75);
            const times = history.points.map((point) => point.time);
            return [rates, split, times, [0, 0.3, 7, 20, 21].map(niceMaximum)];
        }""",
        real,
    )
    assert found[0] == [None, 10, None, 10], "no rate at the start, and none across a start of the server"
    assert found[1] == [3, 1]
    assert found[2] == [1002, 1003, 1010, 1302]
    assert found[3] == [1, 0.5, 10, 20, 50]


def test_numbers_as_text(page: Page) -> None:
    texts: dict[str, dict[float, str]] = {
        "seconds": {0.0042: "4.2 ms", 0.25: "250 ms", 0.9999: "1.00 s", 12.34: "12.3 s", 75: "1 min 15 s"},
        "bytes": {0: "0 B", 1536: "1.5 KiB", 268435456: "256 MiB"},
        "percent": {0: "0 %", 0.004: "0.4 %", 1: "100 %"},
        "duration": {0.5: "0 s", 3600: "1 h", 90061: "1 d 1 h"},
        "short": {3.14159: "3.14", 42.5: "42.5", 12345: "12.3 k", 2.5e6: "2.5 M"},
        "count": {1234567: "1,234,567"},
    }
    page.goto("/ui/icon.svg")  # any file of the server: modules are loaded from there
    written = page.evaluate(
        """async (texts) => {
            const format = await import("/ui/admin-format.js");
            return texts.map(([name, values]) => [...values, null].map(format[name]));
        }""",
        [[name, list(values)] for name, values in texts.items()],
    )
    assert written == [[*values.values(), "–"] for values in texts.values()]


def test_no_serious_fault_of_accessibility(page: Page, answers: Answers) -> None:
    row = {"number": 1, "id": "r1", "caller": "alice", "stage": "waiting", "seconds": 1.5, "images": 2,
           "choices": 1, "tokens": 0}  # fmt: skip
    answers.change("requests", value={"total": 1, "rows": [row]})
    answers.change("slow", value=[SLOW])
    answers.change("engine", "status", value="draining")
    show(page)
    page.clock.resume()  # the checker sets timers of its own
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        found = Axe().run(page).response["violations"]
        assert [(theme, fault["id"], fault["nodes"][0]["target"]) for fault in found] == []


def test_it_fits_a_phone_and_is_used_with_the_keyboard(page: Page, answers: Answers) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    show(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    reached = []
    for _ in range(11):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("(document.activeElement.ariaLabel || document.activeElement.innerText).trim()")
        )
    assert reached[:2] == ["Skip to the figures", "Chat"]
    for name in (
        "Operations",
        "Pause",
        "Requests in the engine, table",
        "Slow requests, table",
        "Caches, table",
    ):
        assert name in reached


def test_its_scripts_write_no_markup() -> None:
    files = sorted(FOLDER.glob("admin*.js"))
    assert len(files) >= 6
    for file in files:
        text = file.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "localStorage",
        ):
            assert word not in text, (file.name, word)
