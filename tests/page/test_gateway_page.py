"""The pages of a gateway in Chromium: chat before a real engine, and the page for operators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from fovea.access.keys import digest, read_key_file
from fovea.gateway.tenants.keys import TenantLimits
from tests.page.conftest import EXAMPLES
from tests.page.gateway import ADMIN, ALICE, RunningGateway, gateway
from tests.page.support import DONE, WIDE, Watch, ask, forget, paste_file
from tests.page.test_admin_page import THEMES, cells
from tests.server.support import Server


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with gateway(server.url, tmp_path_factory.mktemp("gateway")) as front:
        yield front


@pytest.fixture(scope="module")
def own_tab(browser: Browser, front: RunningGateway) -> Iterator[tuple[Page, Watch]]:
    """A tab that the tests of this module share."""
    with browser.new_context(
        base_url=front.url, permissions=["clipboard-read", "clipboard-write"]
    ) as context:
        watch = Watch(context, front.url)
        yield context.new_page(), watch


@pytest.fixture
def blank(own_tab: tuple[Page, Watch], front: RunningGateway) -> Iterator[Page]:
    """A tab in which nothing is stored of the gateway."""
    page, watch = own_tab
    page.unroute_all()
    page.goto(f"{front.url}/ui/icon.svg")
    page.evaluate("sessionStorage.clear()")
    forget(page, front.url)
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.set_viewport_size(WIDE)
    watch.reset()
    watch.expected = ("401", "400")
    yield page
    watch.check(page)


@pytest.fixture
def admin(blank: Page) -> Page:
    """The page for operators with all its sections."""
    blank.evaluate(f"sessionStorage.setItem('fovea-admin-key', '{ADMIN}')")
    blank.goto("/admin")
    for table in ("backends", "tenants", "keys", "usage"):
        expect(blank.locator(f"#{table} tbody tr").first).to_be_visible()
    expect(blank.locator(".experiment tbody tr")).to_have_count(2)
    return blank


def test_chat_shows_relevance_and_stages_of_the_engine_behind_it(blank: Page) -> None:
    """With a key, an image and the method relevance: the gateway passes on what the engine tells."""
    blank.goto("/")
    blank.get_by_label("API key").fill(ALICE)
    blank.keyboard.press("Enter")
    blank.locator("#status", has_text="Ready").wait_for()
    assert blank.locator("#model option").all_inner_texts() == ["fovea-tiny", "m", "ma", "mb"]
    assert blank.locator("#attach").get_attribute("title") == "Attach images or a video"
    assert "Paste, drop or choose images or a video" in blank.locator("#thread").inner_text()
    blank.select_option("#method", "relevance")
    paste_file(blank, EXAMPLES / "page.png")
    with blank.expect_response("**/v1/chat/completions") as answer:
        ask(blank, "What does the text say?")
    sent = json.loads(answer.value.request.post_data or "")
    assert sent["visual_tokens"] == {"method": "relevance", "keep": 0.5, "explain": True}
    assert answer.value.headers["x-fovea-backend"] == "tiny"
    assert "280 of 560 visual tokens" in blank.locator(f"{DONE} .facts").inner_text()
    assert blank.locator(f"{DONE} .stages tbody tr").count() >= 3
    assert blank.locator(".answer .thumb .heat").count() == 1
    blank.set_input_files("#files", {"name": "a.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.4"})
    blank.get_by_text("a.pdf: PDF files are not read behind a gateway.").wait_for()


def test_the_pages_are_open_and_what_they_ask_for_is_not(front: RunningGateway) -> None:
    with httpx.Client(base_url=front.url) as client:
        for path in ("/", "/admin", "/ui/gateway.js"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert client.head(path).headers["content-length"] == str(len(answer.content))
            assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
            assert client.post(path).headers["allow"] == "GET, HEAD"
        assert "Fleet" in client.get("/admin").text
        assert client.get("/ui/nothing.js").status_code == 404
        for path in ("/admin/live", "/admin/keys", "/admin/tenants", "/admin/usage", "/admin/experiments"):
            assert client.get(path).status_code == 401


def test_fleet_usage_and_experiments_are_shown(admin: Page, front: RunningGateway) -> None:
    fleet = {row[0].split("\n")[0]: row for row in cells(admin, "backends")}
    assert fleet.keys() == {"tiny", "a", "b"}
    assert fleet["tiny"][1:3] == ["accepts requests", "fovea-tiny\nengine: Fovea"]
    report = front.get("/admin/usage?by=day&days=30")
    (day,) = cells(admin, "usage")
    (row,) = report["rows"]
    assert day[0] == row["day"]
    assert day[1] == str(row["requests"])
    assert re.match(r"0\.\d+ EUR", day[8])
    admin.select_option("#usage-by", "tenant")
    expect(admin.locator("#usage tbody th")).to_have_text("alice")
    arms = admin.locator(".experiment tbody tr").all_inner_texts()
    assert [arm.split("\n")[0] for arm in arms] == ["old", "new"]
    assert "75 %" in arms[0]
    assert "25 %" in arms[1]
    assert (
        sum(each["requests"] for each in front.get("/admin/experiments")["experiments"][0]["variants"]) == 4
    )


def test_a_backend_is_drained_and_gets_requests_again(admin: Page, front: RunningGateway) -> None:
    for text, state in (("Drain", "drained"), ("Undrain", "accepts requests")):
        admin.get_by_role("button", name=f"{text} backend b", exact=True).click()
        expect(admin.locator("#backends tbody tr", has_text="mb").locator(".chip")).to_have_text(state)
    assert [each["draining"] for each in front.get("/admin/backends")["backends"]] == [False] * 3
    expect(admin.locator("#fleet-note")).to_have_text("b gets requests again, few at first.")
    admin.get_by_role("button", name="Clear cached answers").click()
    admin.locator("dialog[open]").get_by_role("button", name="Remove", exact=True).click()
    expect(admin.locator("#fleet-note")).to_have_text(re.compile(r"\d+ cached answers were removed."))
    admin.get_by_role("button", name="Read the configuration again").click()
    expect(admin.locator("#fleet-problem")).to_contain_text(
        "the gateway has no configuration file to read again"
    )


def test_a_key_is_made_shown_once_limited_and_revoked(admin: Page, front: RunningGateway) -> None:
    admin.get_by_role("button", name="New key").click()
    dialog = admin.locator("#edit-key")
    dialog.get_by_label("Name of its client").fill("not a name")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("name is 'not a name'; accepted: 1 to 64 letters")
    dialog.get_by_label("Name of its client").fill("bob")
    dialog.get_by_label("Refused from").fill("2099-01-31")
    dialog.get_by_text("Limits").click()
    dialog.get_by_label("requests per day").fill("3")
    dialog.get_by_label("models").fill("ma, mb")
    dialog.get_by_role("button", name="Save").dblclick()  # makes one key
    secret = admin.locator("#secret")
    expect(secret).to_be_visible()
    key = secret.locator("output").inner_text()
    assert key.startswith("fv-")
    secret.get_by_role("button", name="Copy").click()
    expect(secret.get_by_text("Copied.")).to_be_visible()
    assert admin.evaluate("navigator.clipboard.readText()") == key
    secret.get_by_role("button", name="Done").click()
    expect(secret.locator("output")).to_have_text("")
    assert key not in admin.content()
    assert key not in admin.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")
    digits = digest(key.encode()).hex()[:8]
    row = admin.locator("#keys tbody tr", has_text=digits)
    expect(row).to_contain_text("2099-01-31")
    (record,) = [each for each in read_key_file(front.keys, TenantLimits).records if each.name == "bob"]
    assert record.limits == TenantLimits(requests_per_day=3, models=("ma", "mb"))

    admin.get_by_role("button", name="Limits of bob").click()
    limits = admin.locator("#edit-limits")
    assert limits.get_by_label("requests per day").input_value() == "3"
    limits.get_by_label("requests per day").fill("many")
    limits.get_by_role("button", name="Save").click()
    expect(limits.get_by_role("alert")).to_contain_text("requests_per_day is 'many'; accepted: 0 to")
    limits.get_by_label("requests per day").fill("5")
    limits.get_by_label("models").fill("")
    limits.get_by_role("button", name="Save").click()
    expect(admin.locator("#tenants tbody tr", has_text="bob")).to_contain_text("requests per day: 0 of 5")

    admin.get_by_role("button", name=f"Change key {digits} of bob").click()
    dialog.get_by_label("metrics").check()
    dialog.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("api, metrics")
    admin.get_by_role("button", name=f"Revoke key {digits} of bob").click()
    admin.locator("dialog[open]").get_by_role("button", name="Revoke", exact=True).click()
    expect(row).to_have_count(0)
    own = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{front.url}/v1/models", headers=own).status_code == 401


def test_the_last_admin_key_is_not_revoked_by_mistake(admin: Page) -> None:
    digits = digest(ADMIN.encode()).hex()[:8]
    admin.get_by_role("button", name=f"Revoke key {digits} of ops").click()
    admin.locator("dialog[open]").get_by_role("button", name="Revoke", exact=True).click()
    expect(admin.locator("#keys-problem")).to_contain_text("no key with the role admin would be left")


def test_the_key_is_asked_for_and_forgotten(blank: Page) -> None:
    blank.goto("/admin")
    dialog = blank.locator("#key-dialog")
    dialog.get_by_label("Key", exact=True).fill(ALICE)
    blank.keyboard.press("Enter")
    expect(dialog).to_contain_text("the admin key is not valid here")
    dialog.get_by_label("Key", exact=True).fill(ADMIN)
    blank.keyboard.press("Enter")
    expect(blank.locator("#state-text")).to_have_text("ready")
    assert blank.evaluate("[{...sessionStorage}, document.cookie]") == [{"fovea-admin-key": ADMIN}, ""]
    blank.get_by_role("button", name="Forget key").click()
    expect(blank.locator("#board")).to_be_hidden()
    assert blank.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize("theme", THEMES)
def test_no_fault_of_accessibility_and_it_fits_a_phone(admin: Page, theme: str) -> None:
    admin.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    found = [Axe().run(admin)]
    for name in ("New key", "Limits of alice"):
        admin.get_by_role("button", name=name).click()
        found.append(Axe().run(admin))
        admin.keyboard.press("Escape")
    faults = [fault for each in found for fault in each.response["violations"]]
    assert [(fault["id"], fault["nodes"][0]["target"]) for fault in faults] == []
    admin.set_viewport_size({"width": 360, "height": 740})
    assert admin.evaluate("document.documentElement.scrollWidth") <= 360
    admin.get_by_role("button", name="Limits of alice").click()
    wide = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth).length"
    assert admin.locator("dialog[open], dialog[open] .limits").evaluate_all(wide) == 0
    admin.keyboard.press("Escape")


def test_rates_and_times_come_from_two_snapshots(blank: Page) -> None:
    blank.goto("/ui/icon.svg")  # any file of the gateway: modules are loaded from there
    names = ["answered", "refused", "failed", "prompt_tokens", "visual_tokens", "completion_tokens"]
    zero = dict.fromkeys((*names, "request_seconds", "request_count", "waiting_seconds", "waiting_count"), 0)
    later = zero | {"answered": 10, "completion_tokens": 50, "request_seconds": 3, "request_count": 6}
    values = blank.evaluate(
        """async ([zero, later]) => {
            const { History } = await import("/ui/admin-history.js");
            const { gatewayValues } = await import("/ui/gateway-history.js");
            const { money } = await import("/ui/gateway-tables.js");
            const history = new History(gatewayValues);
            const at = (time, uptime_seconds, totals) => history.add(
                { time, uptime_seconds, totals, running: 1, waiting: 2 }).values;
            return [at(100, 10, zero), at(102, 12, later), at(103, 1, later),
                [0, 0.012345, 12.5, null].map((value) => money(value, "EUR"))];
        }""",
        [zero, later],
    )
    first, second, restarted, texts = values
    assert first["answered"] is None
    assert (second["answered"], second["completion_tokens"]) == (5, 25)
    assert (second["seconds"], second["waited"], second["waiting"]) == (0.5, None, 2)
    assert restarted["answered"] is None, "the gateway has started again"
    assert texts == ["0.00 EUR", "0.0123 EUR", "12.50 EUR", "–"]


def test_its_scripts_write_no_markup_and_store_nothing() -> None:
    for file in sorted((Path(__file__).parents[2] / "src/fovea/http/static").glob("gateway*.js")):
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 300
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "eval(",
            "localStorage",
            "document.cookie",
        ):
            assert word not in text, (file.name, word)
