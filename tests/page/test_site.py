"""The built documentation in Chromium (`make test-site` builds it and names its folder)."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.page.support import WIDE, Watch

SITE = os.environ.get("FOVEA_TEST_SITE", "")
PHONE = {"width": 390, "height": 844}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SITE, reason="FOVEA_TEST_SITE names no site; `make test-site` builds one"),
]


class Silent(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the newest version."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        newest = json.loads((Path(SITE) / "versions.json").read_text())[0]["version"]
        yield f"http://127.0.0.1:{server.server_port}/{newest}/"
        server.shutdown()


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of the site, which must load nothing from elsewhere and have no errors."""
    with browser.new_context(color_scheme=request.param, viewport=WIDE) as context:
        watch = Watch(context, address)
        page = context.new_page()
        page.goto(f"{address}index.html")
        yield page
        watch.check(page)


def test_every_page_fits_a_phone_and_has_enough_contrast(page: Page, address: str) -> None:
    for name in ("index", "install", "reference-settings", "notebooks/ask", "comparison"):
        page.set_viewport_size(WIDE)
        page.goto(f"{address}{name}.html")
        found = [each for each in Axe().run(page).response["violations"] if each["impact"] == "serious"]
        assert found == [], name
        page.set_viewport_size(PHONE)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name


def test_a_search_leads_to_its_section(page: Page) -> None:
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox", name="Search").fill("cached regions")
    page.get_by_role("option").first.click()
    page.wait_for_url("**/relevance.html*")


def test_the_menu_lists_the_versions(page: Page, address: str) -> None:
    link = page.locator(".md-version__link").first
    link.wait_for(state="attached")
    assert link.evaluate("link => link.href") == address


def test_the_root_leads_to_the_newest_version(page: Page, address: str) -> None:
    page.goto(address.rsplit("/", 2)[0] + "/")
    page.wait_for_url(f"{address}index.html")
