"""Fixtures of the page's tests: one Chromium and one server with the bundled model for a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.page.support import WIDE, Watch, chromium, forget, opened
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


@pytest.fixture(scope="module")
def tab(browser: Browser, server: Server) -> Iterator[tuple[Page, Watch]]:
    """An empty tab, and what watches it. The tests of a module share it, because a new one takes a second."""
    with browser.new_context(permissions=["clipboard-read", "clipboard-write", "camera"]) as context:
        watch = Watch(context, server.url)
        yield context.new_page(), watch


@pytest.fixture
def watch(tab: tuple[Page, Watch]) -> Watch:
    """The watch of the test's page, for tests that cause errors on purpose."""
    return tab[1]


@pytest.fixture
def page(tab: tuple[Page, Watch], watch: Watch, server: Server) -> Iterator[Page]:
    """The page, opened as if for the first time: the browser has stored nothing of it."""
    page = tab[0]
    page.unroute_all()
    page.goto("about:blank")
    forget(page, server.url)
    page.emulate_media(color_scheme="light", reduced_motion="no-preference")
    page.set_viewport_size(WIDE)
    watch.reset()
    yield opened(page, server.url)
    watch.check(page)
