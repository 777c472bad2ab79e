"""Draw the pictures of the page that docs/page.md and README.md show.

    python -m tools.screenshots [--folder docs/images]

It starts a server with the bundled model, a gateway before it, and Chromium, asks questions, and writes
page-light.png, page-dark.png and gateway-light.png. Run it again when a page looks different.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page
from tests.page.gateway import ADMIN, ALICE, gateway
from tests.page.support import ask, choose_budget, chromium, opened, paste_file
from tests.server.support import running

from fovea import Engine
from fovea.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SIZE = {"width": 1280, "height": 840}
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as files,
        Engine.from_pretrained("fovea-tiny", device="cpu", kv_cache_mib=64) as engine,
        running(engine, ServerSettings(), Path(files)) as server,
        chromium() as browser,
    ):
        for theme in THEMES:
            engine.clear_caches()
            path = folder / f"page-{theme}.png"
            draw(browser, server.url, theme, path)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
        with gateway(server.url, Path(files)) as front:
            path = folder / "gateway-light.png"
            draw_gateway(browser, front.url, path)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def draw(browser: Browser, url: str, theme: Theme, path: Path) -> None:
    """Ask two questions about an image in a theme, and write a picture of the page."""
    with browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce") as context:  # type: ignore[arg-type]
        page = opened(context.new_page(), url)
        other_conversations(page)
        paste_file(page, EXAMPLES / "page.png")
        choose_budget(page, 50)
        ask(page, "What does the text say?")
        page.locator(".stages summary").last.click()
        page.locator("#scroll").evaluate("(scroll) => { scroll.scrollTop = 0; }")
        page.mouse.move(640, 30)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)


def draw_gateway(browser: Browser, url: str, path: Path) -> None:
    """Write a picture of the page for operators of a gateway that answers a few questions meanwhile."""
    ask_again = {"model": "m", "messages": [{"role": "user", "content": "again?"}], "max_tokens": 16}
    with browser.new_context(viewport=SIZE, color_scheme="light", reduced_motion="reduce") as context:
        page = context.new_page()
        page.goto(f"{url}/ui/icon.svg")
        page.evaluate("([name, key]) => sessionStorage.setItem(name, key)", ["fovea-admin-key", ADMIN])
        page.goto(f"{url}/admin")
        page.locator(".experiment tbody tr").nth(1).wait_for()
        for number in range(30):
            for _ in range(number % 7):
                body = {**ask_again, "user": str(number)}
                httpx.post(
                    f"{url}/v1/chat/completions", json=body, headers={"x-api-key": ALICE}
                ).raise_for_status()
            page.wait_for_timeout(1000)
        page.screenshot(path=str(path), full_page=True)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)


def other_conversations(page: Page) -> None:
    """Fill the list of conversations."""
    for name, question in (
        ("shapes.png", "How many objects can you see?"),
        ("sign.png", "What text is in the image?"),
    ):
        paste_file(page, EXAMPLES / name)
        ask(page, question)
        page.get_by_role("button", name="New conversation").click()
        page.locator(".welcome").wait_for()


if __name__ == "__main__":
    main()
