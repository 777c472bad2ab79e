"""The page in a real browser with a real server: media, answers, history, stopping, accessibility."""

from __future__ import annotations

import base64
import json
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.page.conftest import EXAMPLES
from tests.page.support import (
    DONE,
    answer_with,
    ask,
    choose_budget,
    events,
    paste_file,
    text_chunk,
    with_fields,
)
from tests.server.support import Server, until

ENDLESS = 7000
PICTURE = EXAMPLES / "page.png"


def test_a_copied_image_is_pasted_with_the_keyboard(page: Page) -> None:
    """The image is in the clipboard of the browser, and Ctrl+V is a key press: no event is made up."""
    page.evaluate(
        """async (data) => {
            const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
            const blob = new Blob([bytes], { type: "image/png" });
            await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        }""",
        base64.b64encode((EXAMPLES / "shapes.png").read_bytes()).decode(),
    )
    page.focus("#question")
    page.keyboard.press("Control+V")
    page.locator(".attachment").wait_for()
    ask(page, "How many objects can you see?")
    assert "3" in page.locator(f"{DONE} .text").inner_text()
    assert page.locator(".question .thumb img").evaluate("(image) => image.naturalWidth") == 320


def test_a_file_is_dropped_anywhere_on_the_page(page: Page) -> None:
    """The browser's own drag and drop, as from a file manager."""
    devtools = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        data = {"items": [], "files": [str(EXAMPLES / "sign.png")], "dragOperationsMask": 1}
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 600, "y": 300, "data": data})
        if kind == "dragOver":
            page.locator("#drop-cover").wait_for()
    page.locator(".attachment").wait_for()
    assert page.locator(".attachment .caption").inner_text() == "sign.png"
    assert page.locator("#drop-cover").is_hidden()
    page.get_by_role("button", name="Remove sign.png").click()
    assert page.locator(".attachment").count() == 0


def test_boxes_and_heat_map_match_the_answer_at_two_zooms(page: Page) -> None:
    paste_file(page, PICTURE)
    choose_budget(page, 50)
    effect = page.locator("#budget-effect").inner_text()
    assert "−1.1 points" in effect
    with page.expect_response("**/v1/chat/completions") as answer:
        ask(page, "What does the text say?")
    [relevance] = [
        json.loads(line[6:])["fovea"]["images"][0]["relevance"]
        for line in answer.value.text().split("\n")
        if '"fovea":{' in line
    ]
    given = [region for region in relevance["regions"] if region["tokens"]]
    given.sort(key=lambda region: (-region["tokens"], -region["relevance"]))
    chosen = [region["box"] for region in given]
    assert len(chosen) > 1
    page.locator(".answer .thumb").click()
    page.locator("#viewer[open]").wait_for()
    widths = []
    for _ in range(2):
        image = page.locator(".stage > img").bounding_box()
        assert image is not None
        widths.append(image["width"])
        shown = page.locator(".stage .region").evaluate_all(
            "(all) => all.map((each) => { const box = each.getBoundingClientRect();"
            " return [box.left, box.top, box.right, box.bottom]; })"
        )
        for box, expected in zip(shown, chosen, strict=True):
            for side, share in enumerate(expected):
                start, length = (image["y"], image["height"]) if side % 2 else (image["x"], image["width"])
                assert abs(box[side] - (start + share * length)) <= 1
        page.keyboard.press("+")
    assert widths[1] > widths[0]
    heat = page.locator(".stage .heat")
    assert heat.evaluate("(canvas) => [canvas.height, canvas.width]") == relevance["grid"]
    assert heat.bounding_box() == page.locator(".stage > img").bounding_box()
    rows = page.locator(".viewer-side tbody tr")
    assert rows.count() == len(chosen)
    rows.first.focus()
    assert page.locator(".region.marked").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#viewer[open]").count() == 0


def test_choosing_a_method_takes_half_of_the_tokens(page: Page) -> None:
    """It left the share at all tokens, where a method does nothing and no map appears."""
    shown = page.locator("#keep-value")
    page.select_option("#method", "relevance")
    assert shown.inner_text() == "50\u00a0%"
    page.locator("#keep").fill("25")
    page.select_option("#method", "dpp")
    assert shown.inner_text() == "25\u00a0%", "a share that was chosen stays"
    page.locator("#keep").fill("100")
    page.select_option("#method", "dart")
    assert shown.inner_text() == "100\u00a0%"
    page.select_option("#method", "server")
    page.select_option("#method", "relevance")
    assert shown.inner_text() == "50\u00a0%"


def test_what_is_saved_is_the_difference(page: Page) -> None:
    """The page said "Saves 97 ms to the first token, not 328": the time that is left, not the one saved."""
    words = page.evaluate(
        """async () => {
            const { describeBudget } = await import("./ui/budget.js");
            const row = (ttft_ms) => ({ ttft_ms, all: 90, small_details: 80 });
            const methods = { relevance: { 0.5: row(96.6), 0.25: row(400.4) } };
            const figures = { full: row(327.8), methods };
            return describeBudget(figures, "relevance", 0.4).measured.map(({ label, time }) => [label, time]);
        }"""
    )
    assert words == [
        ["Costs", "72 ms to the first token (400 ms, not 328 ms)"],
        ["Saves", "231 ms to the first token (97 ms, not 328 ms)"],
    ]


def test_history_outlives_a_reload_and_caches_are_shown(page: Page) -> None:
    paste_file(page, EXAMPLES / "sign.png")
    ask(page, "What text is in the image?")
    first = page.locator(f"{DONE} .text").inner_text()
    ask(page, "What text is in the image?")
    facts = page.locator(f"{DONE} .facts").nth(1)
    assert "prompt tokens cached" in facts.inner_text()
    assert "image not encoded again" in facts.inner_text()
    assert "tokens/s" in facts.inner_text()
    assert page.locator(".stages").nth(1).locator("tbody tr").count() >= 3
    page.reload()
    page.locator(DONE).nth(1).wait_for()
    assert page.locator(f"{DONE} .text").first.inner_text() == first
    assert page.locator(".question .thumb img").evaluate("(image) => image.naturalWidth") == 416
    assert page.locator("#conversations a[aria-current=page]").inner_text() == "What text is in the image?"


def test_an_edited_question_and_another_answer_are_versions(page: Page) -> None:
    answer_with(page, "One.")
    ask(page, "first")
    page.get_by_role("button", name="Edit this question").click()
    assert page.input_value("#question") == "first"
    page.fill("#question", "second")
    page.keyboard.press("Enter")
    page.get_by_text("2 of 2").wait_for()
    assert page.locator(".question .text").inner_text() == "second"
    page.get_by_role("button", name="Answer again").click()
    page.locator(".answer .versions").wait_for()
    page.locator(".question").get_by_role("button", name="Earlier version").click()
    page.get_by_text("1 of 2").wait_for()
    assert page.locator(".question .text").inner_text() == "first"
    assert page.locator(".answer .versions").count() == 0


def test_stop_ends_the_generation_on_the_server(page: Page, server: Server) -> None:
    """The engine stops long before the answer's last token, and nothing runs any more."""
    with_fields(page, ignore_eos=True, max_tokens=ENDLESS)
    before = _generated(server)
    page.fill("#question", "Count to one thousand.")
    page.keyboard.press("Enter")
    page.locator(".answer .text", has_text=re.compile(r"\w.{20}", re.DOTALL)).wait_for()
    assert page.get_by_role("button", name="Stop").is_enabled()
    assert server.metrics()["fovea:requests_running"] == 1
    page.keyboard.press("Escape")
    page.locator(".answer[data-state=stopped]").wait_for()
    until(lambda: server.metrics()["fovea:requests_running"] == 0)
    assert _generated(server) - before < ENDLESS / 2
    assert "stopped" in page.locator(".facts").inner_text()
    assert page.get_by_role("button", name="Send").count() == 1


def _generated(server: Server) -> float:
    lines = server.get("/metrics").text.splitlines()
    name = 'fovea:tokens_total{kind="completion"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    answer_with(page, "# Title\n\n- **one**\n- `two`\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n```\ncode\n```")
    paste_file(page, EXAMPLES / "sign.png")
    ask(page, "What is it?")
    page.locator(".question .thumb").click()
    page.locator("#viewer[open]").wait_for()
    shown = [Axe().run(page)]
    page.keyboard.press("Escape")
    shown.append(Axe().run(page))
    found = [
        (fault["id"], [node["target"] for node in fault["nodes"]])
        for result in shown
        for fault in result.response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert found == []


def test_markup_in_an_answer_stays_text(page: Page) -> None:
    hostile = (
        "<img src=x onerror='window.hurt = 1'> <script>window.hurt = 1</script>\n\n"
        "[link](javascript:window.hurt=1) [link](https://example.org/) **<b onclick=hurt()>**\n\n"
        "![picture](https://example.org/secret.png)"
    )
    answer_with(page, hostile)
    ask(page, "<img src=x onerror='window.hurt = 1'>")
    text = page.locator(f"{DONE} .text")
    assert "<img src=x onerror='window.hurt = 1'>" in text.inner_text()
    assert page.locator("#thread img, #thread script, #thread b").count() == 0
    links = text.locator("a").evaluate_all("(all) => all.map((each) => [each.href, each.rel])")
    assert {(address, rel) for address, rel in links} <= {
        ("https://example.org/", "noopener noreferrer"),
        ("https://example.org/secret.png", "noopener noreferrer"),
    }
    assert page.evaluate("window.hurt") is None


def test_events_are_read_wherever_they_are_cut(page: Page) -> None:
    """The parser of the page gets a stream of multi-byte characters in every possible pair of parts."""
    stream = ': note\r\ndata: {"a":"é🙂"}\r\n\r\nevent: error\rdata: 1\rdata: 2\r\rdata:x\n\ndata: cut off'
    wrong = page.evaluate(
        """async (stream) => {
            const { EventParser } = await import("./ui/sse.js");
            const bytes = new TextEncoder().encode(stream);
            const expected = JSON.stringify([
                { type: "message", data: '{"a":"é🙂"}' }, { type: "error", data: "1\\n2" },
                { type: "message", data: "x" }]);
            const wrong = [];
            for (let at = 0; at <= bytes.length; at += 1) {
                const parser = new EventParser();
                const parts = [bytes.slice(0, at), bytes.slice(at)];
                const events = [...parts.flatMap((part) => parser.feed(part)), ...parser.end()];
                if (JSON.stringify(events) !== expected) wrong.push([at, events]);
            }
            const parser = new EventParser();
            const single = [...bytes].flatMap((byte) => parser.feed(Uint8Array.of(byte)));
            if (JSON.stringify(single) !== expected) wrong.push(["single bytes", single]);
            return wrong;
        }""",
        stream,
    )
    assert wrong == []


def test_an_error_in_the_stream_is_shown_and_can_be_repeated(page: Page) -> None:
    body = events(text_chunk("Half"), {"error": {"message": "The engine broke."}}, done=False)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    page.fill("#question", "Go on.")
    page.keyboard.press("Enter")
    assert page.get_by_role("alert").inner_text() == "The engine broke."
    assert "Half" in page.locator(".answer .text").inner_text()
    page.unroute("**/v1/chat/completions")
    answer_with(page, "Whole.")
    page.get_by_role("button", name="Answer again").click()
    page.locator(DONE).get_by_text("Whole.").wait_for()
