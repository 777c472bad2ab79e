"""The page with a model for text alone: it offers no images, and says why a chosen one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from fovea import Engine
from fovea.server.settings import ServerSettings
from tests.page.conftest import EXAMPLES
from tests.page.support import DONE, ask
from tests.server.support import Server, running
from tests.support.checkpoints.text import write_text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_text("llama", tmp_path_factory.mktemp("text"))
    with (
        Engine.from_pretrained(
            str(folder), dtype="float32", threads=1, kv_cache_mib=16, max_context=1000
        ) as engine,
        running(engine, ServerSettings(), folder) as server,
    ):
        yield server


def test_images_are_neither_offered_nor_taken(page: Page) -> None:
    page.get_by_role("heading", name="Ask a question").wait_for()
    assert page.get_by_role("heading", name="Ask about an image").count() == 0
    assert page.locator("#attach").is_hidden()
    assert page.locator("#camera").is_hidden()
    page.set_input_files("#files", EXAMPLES / "page.png")
    page.get_by_text("takes text alone.").wait_for()
    assert page.locator(".attachment").count() == 0
    ask(page, "hello?")
    assert page.locator(f"{DONE} .text").count() == 1
