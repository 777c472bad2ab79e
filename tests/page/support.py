"""A Chromium that is watched: a test fails if the page leaves its server, breaks its policy or has errors."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

from tests.support.programs import program

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)  # fmt: skip
WIDE = {"width": 1280, "height": 820}
PATIENCE_MS = 15_000
DONE = ".answer[data-state=done]"
MARKS = ("fovea:first-event", "fovea:first-visible")
"""The page's marks: the first text of an answer arrived, and the frame that shows it is over."""
BLOCK = (
    "Here",
    "is",
    "**one**",
    "sentence",
    "about",
    "`it`.",
    "\n\n- a list\n- of two\n\n```\ncode\n```\n\n",
)
"""Chunks of an answer in Markdown."""
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without a window. Skips the test if it is not installed."""
    path = program("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Watch:
    """Notes what a page must never do: requests to other hosts, violations of its policy, errors.

    expected: texts of errors on the console that the test itself causes.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self._host = urlsplit(url).netloc
        self.foreign: list[str] = []
        self.errors: list[str] = []
        self.reset()
        context.add_init_script(_WATCH)
        context.on("request", lambda request: self._note(request.url))
        context.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        context.on("weberror", lambda error: self.errors.append(str(error.error)))

    def reset(self) -> None:
        """Forget everything, for the next test."""
        self.foreign.clear()
        self.errors.clear()
        self.expected: tuple[str, ...] = ()

    def _note(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("blob", "data", "about") and parts.netloc != self._host:
            self.foreign.append(address)

    def check(self, page: Page) -> None:
        """Raise AssertionError if the page did any of it."""
        violations = page.evaluate("window.violations")
        assert violations == [], violations
        assert self.foreign == [], self.foreign
        unexpected = [text for text in self.errors if not any(part in text for part in self.expected)]
        assert unexpected == [], unexpected


def forget(page: Page, url: str) -> None:
    """Let the browser delete all that it has stored for the server: sessions, options, history."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
    devtools.detach()


def opened(page: Page, url: str) -> Page:
    """Open the page, and wait until it says that the server is ready."""
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.locator("#status", has_text="Ready").wait_for()
    return page


def ask(page: Page, question: str) -> None:
    """Type a question, send it with the Enter key, and wait until its answer is complete."""
    before = page.locator(DONE).count()
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator(DONE).nth(before).wait_for()


def paste_file(page: Page, path: Path, media_type: str = "image/png") -> None:
    """Paste a file by an event as a browser sends it, and wait until it is attached."""
    before = page.locator(".attachment").count()
    page.evaluate(
        """([data, type, name]) => {
            const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
            const clipboardData = new DataTransfer();
            clipboardData.items.add(new File([bytes], name, { type }));
            document.querySelector("#question").dispatchEvent(
                new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }""",
        [base64.b64encode(path.read_bytes()).decode(), media_type, path.name],
    )
    page.locator(".attachment").nth(before).wait_for()


def choose_budget(page: Page, share: int, method: str = "relevance") -> None:
    """Move the slider of visual tokens, in percent."""
    page.select_option("#method", method)
    page.locator("#keep").fill(str(share))


def events(*chunks: dict[str, Any], done: bool = True) -> str:
    """The bytes of a stream with these chunks."""
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + (
        "data: [DONE]\n\n" if done else ""
    )


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


def answer_with(page: Page, text: str) -> None:
    """Let the server seem to answer every question with this text."""

    def respond(route: Route) -> None:
        body = events(text_chunk(text), text_chunk("", "stop"))
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", respond)


def with_fields(page: Page, **fields: Any) -> list[dict[str, Any]]:
    """Add fields to the requests for answers. Returns a list to which each request's body is added."""
    bodies: list[dict[str, Any]] = []

    def change(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or "{}") | fields)
        route.continue_(post_data=json.dumps(bodies[-1]))

    page.route("**/v1/chat/completions", change)
    return bodies
