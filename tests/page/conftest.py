"""Fixtures of the page's tests: one Chromium and one server with the bundled model for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.page.support import WIDE, Watch, chromium, opened
from tests.server.support import Server, running

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        Engine.from_pretrained("fovea-tiny", device="cpu", threads=1, kv_cache_mib=64) as engine,
        running(engine, ServerSettings(), tmp_path_factory.mktemp("files")) as server,
    ):
        yield server


@pytest.fixture
def watch() -> list[Watch]:
    """The watches of the test's pages, for tests that cause errors on purpose."""
    return []


@pytest.fixture
def page(browser: Browser, server: Server, watch: list[Watch]) -> Iterator[Page]:
    """The page, opened in a profile of its own."""
    with browser.new_context(
        viewport=WIDE, permissions=["clipboard-read", "clipboard-write", "camera"]
    ) as context:
        watch.append(Watch(context, server.url))
        page = opened(context.new_page(), server.url)
        yield page
        watch[0].check(page)
