"""The page's further functions in a browser: keys, PDF, camera, video, JSON, import and export, keyboard."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, Route

from fovea.server.settings import ServerSettings
from tests.page.conftest import EXAMPLES
from tests.page.support import DONE, WIDE, Watch, answer_with, ask, opened, paste_file, with_fields
from tests.server.support import Server, running
from tests.support.clips import clip

pytestmark = pytest.mark.slow
SECRET = "a-secret-key"
PIXEL = base64.b64encode((EXAMPLES / "list.png").read_bytes()).decode()


def test_the_key_is_asked_for_and_stays_in_its_tab(browser: Browser, server: Server, tmp_path: Path) -> None:
    settings = ServerSettings(api_keys=(SECRET,))
    with running(server.engine, settings, tmp_path) as closed, browser.new_context(viewport=WIDE) as context:
        watch = Watch(context, closed.url)
        watch.expected = ("401",)
        page = context.new_page()
        page.goto(closed.url)
        dialog = page.locator("#key-dialog")
        dialog.wait_for()
        faults = Axe().run(page).response["violations"]
        assert [each["id"] for each in faults if each["impact"] in ("serious", "critical")] == []
        dialog.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        page.locator("#key-dialog [data-reason]", has_text="not").wait_for()
        dialog.get_by_label("API key").fill(SECRET)
        dialog.get_by_role("button", name="Use key").click()
        page.locator("#status", has_text="Ready").wait_for()
        ask(page, "Hello?")
        stored = page.evaluate("[sessionStorage['fovea-key'], JSON.stringify(localStorage), document.cookie]")
        assert stored[0] == SECRET
        assert SECRET not in stored[1] + stored[2]
        assert SECRET not in _exported(page)
        other = context.new_page()
        other.goto(closed.url)
        other.locator("#key-dialog[open]").wait_for()
        watch.check(page)


def test_requests_at_the_same_time_ask_for_the_key_once(page: Page) -> None:
    asked, ends = page.evaluate(
        """async () => {
            const { Client } = await import("./ui/client.js");
            let asked = 0, waiting = 0, release;
            const both = new Promise((resolve) => { release = resolve; });
            const client = new Client({}, async () => { asked += 1; await both; return false; });
            const askOnce = client.askOnce.bind(client);
            client.askOnce = (reason) => {
                const answer = askOnce(reason);
                waiting += 1;
                if (waiting === 2) release();
                return answer;
            };
            const refusal = JSON.stringify({ error: { message: "a key is missing" } });
            client.send = async () => new Response(refusal, { status: 401 });
            const ends = await Promise.allSettled([client.request("a"), client.request("b")]);
            return [asked, ends.map(({ reason }) => reason.message)];
        }"""
    )
    assert (asked, ends) == (1, ["a key is missing"] * 2)


def test_pages_of_a_pdf_become_images(page: Page, watch: Watch, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    watch.expected = ("503",)

    def render(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        asked.append((int(query["first"][0]), int(query["last"][0])))
        assert query["max_side"] == ["1600"]
        assert route.request.headers["content-type"] == "application/pdf"
        url = f"data:image/png;base64,{PIXEL}"
        pages = range(asked[-1][0], asked[-1][1] + 1)
        data = [{"page": number, "width": 256, "height": 320, "image_url": url} for number in pages]
        route.fulfill(json={"object": "list", "pages": 9, "data": data})

    page.route("**/v1/images/pdf?*", render)
    document = tmp_path / "report.pdf"
    document.write_bytes(b"%PDF-1.4")
    page.set_input_files("#files", document)
    page.get_by_label("First").fill("2")
    page.get_by_label("Last").fill("1")
    page.get_by_role("button", name="Attach pages").click()
    assert asked == [(1, 1)]
    page.get_by_label("Last").fill("3")
    page.get_by_role("button", name="Attach pages").click()
    page.locator(".attachment").nth(1).wait_for()
    assert asked == [(1, 1), (2, 3)]
    assert page.locator(".caption").all_inner_texts() == [
        "report.pdf, page 2 of 9",
        "report.pdf, page 3 of 9",
    ]
    ask(page, "List the shapes in the image.")
    page.unroute("**/v1/images/pdf?*")
    error = {"error": {"message": "pypdfium2 is not installed", "code": "pdf_unavailable"}}
    page.route("**/v1/images/pdf?*", lambda route: route.fulfill(status=503, json=error))
    page.set_input_files("#files", document)
    page.get_by_text("report.pdf: This server does not read PDF files: pypdfium2 is not installed").wait_for()


def test_a_real_pdf_is_read(page: Page, tmp_path: Path) -> None:
    """The server draws the pages. A file with a single page is attached at once."""
    pictures = [Image.open(EXAMPLES / name).convert("RGB") for name in ("sign.png", "shapes.png", "list.png")]
    several, single = tmp_path / "several.pdf", tmp_path / "single.pdf"
    pictures[0].save(several, save_all=True, append_images=pictures[1:])
    pictures[1].save(single)
    page.set_input_files("#files", [several, single])
    page.locator("#pdf-dialog", has_text="several.pdf has 3 pages.").wait_for()
    page.get_by_label("First").fill("3")
    page.get_by_role("button", name="Attach pages").click()
    page.locator(".attachment").nth(1).wait_for()
    assert page.locator(".caption").all_inner_texts() == ["several.pdf, page 3 of 3", "single.pdf"]
    ask(page, "What do you see?")
    assert page.locator(".question .thumb img").count() == 2


def test_a_picture_is_taken_with_the_camera(page: Page) -> None:
    page.get_by_role("button", name="Take a picture").click()
    page.locator("#camera-dialog").get_by_role("button", name="Take picture").click()
    page.locator(".attachment").wait_for()
    assert page.locator(".attachment .caption").inner_text() == "camera.jpg"
    assert page.locator("#camera-dialog video").count() == 0


def test_a_video_is_sent_as_the_video_part(page: Page, tmp_path: Path) -> None:
    bodies = with_fields(page)
    film = tmp_path / "film.webm"
    film.write_bytes(clip(24, container="webm"))
    page.set_input_files("#files", film)
    page.locator(".attachment").wait_for()
    ask(page, "What moves?")
    [part, _] = bodies[0]["messages"][0]["content"]
    assert part["video_url"]["url"].startswith("data:video/webm;base64,")
    assert page.locator(".question video").count() == 1


def test_files_of_other_kinds_are_refused_in_words(page: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "broken.png").write_bytes(b"no image")
    page.set_input_files("#files", [tmp_path / "notes.txt", tmp_path / "broken.png"])
    page.get_by_text("notes.txt is neither an image").wait_for()
    page.get_by_text("broken.png cannot be read as an image").wait_for()
    assert page.locator(".attachment").count() == 0


def test_an_answer_in_json_follows_the_schema(page: Page) -> None:
    bodies = with_fields(page)
    paste_file(page, EXAMPLES / "form.png")
    page.get_by_label("JSON of a schema").check()
    page.get_by_label("Schema", exact=True).fill("{")
    page.locator("#schema-problem", has_text="not JSON").wait_for()
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"],
              "additionalProperties": False}  # fmt: skip
    page.get_by_label("Schema", exact=True).fill(json.dumps(schema))
    ask(page, 'How many triangles are there? Reply as JSON {"count": integer}')
    assert bodies[0]["response_format"]["json_schema"]["schema"] == schema
    shown = page.locator(f"{DONE} pre").inner_text()
    assert json.loads(shown) == {"count": 3}
    assert shown == '{\n  "count": 3\n}'
    assert page.locator(".chip.ok", has_text="JSON of the schema").count() == 1


def _exported(page: Page) -> str:
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export").click()
    return Path(saved.value.path()).read_text()


def test_history_is_exported_deleted_and_imported(page: Page, tmp_path: Path) -> None:
    answer_with(page, "An answer.")
    paste_file(page, EXAMPLES / "sign.png")
    ask(page, "first conversation")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "second conversation")
    file = tmp_path / "history.json"
    file.write_text(_exported(page))
    page.get_by_role("button", name="Delete second conversation").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#conversations li").nth(1).wait_for(state="detached")
    page.get_by_role("button", name="Delete all").click()
    page.locator("dialog[open]").get_by_role("button", name="Delete all").click()
    page.locator("#no-history").wait_for()
    assert _stored(page) == {"conversations": 0, "media": 0}
    page.set_input_files("#import-file", file)
    page.get_by_text("2 conversations were added.").wait_for()
    page.locator("#conversations").get_by_text("first conversation").click()
    page.locator(".question .thumb img").wait_for()
    assert page.locator(".question .thumb img").evaluate("(image) => image.naturalWidth") == 416
    assert _stored(page) == {"conversations": 2, "media": 1}
    page.set_input_files("#import-file", file)
    page.get_by_text("0 conversations were added.").wait_for()
    for content in ("{", "{}", json.dumps(json.loads(file.read_text()) | {"conversations": [{"id": 1}]})):
        file.write_text(content)
        page.set_input_files("#import-file", file)
        page.get_by_text("Nothing was imported.").last.wait_for()
    file.write_text(json.dumps({"format": "fovea-history", "version": 1}))
    page.set_input_files("#import-file", file)
    page.get_by_text("Nothing was imported. The file is damaged: a list is missing.").wait_for()
    assert _stored(page) == {"conversations": 2, "media": 1}


def _stored(page: Page) -> dict[str, Any]:
    counts: dict[str, Any] = page.evaluate(
        """async () => {
            const { History } = await import("./ui/history.js");
            const history = await History.open();
            const counts = {};
            for (const store of ["conversations", "media"]) counts[store] = (await history.all(store)).length;
            history.database.close();
            return counts;
        }"""
    )
    return counts


@pytest.mark.parametrize(
    "text", [">" * 5000, "[" * 50_000, "- " * 3000, "`" * 9999, "* " * 20_000, "|" * 9999]
)
def test_odd_markup_is_shown(page: Page, text: str) -> None:
    """Text that would take a careless reader of Markdown minutes, or all of its stack."""
    answer_with(page, f"{text}\n\nThe end.")
    ask(page, "Be odd.")
    assert page.locator(f"{DONE} .text p").last.inner_text() == "The end."


def test_the_focus_stays_where_versions_are_switched(page: Page) -> None:
    answer_with(page, "Yes.")
    ask(page, "one")
    page.get_by_role("button", name="Answer again").press("Enter")
    page.get_by_text("2 of 2").wait_for()
    assert page.evaluate("document.activeElement.id") == "question"
    page.get_by_role("button", name="Earlier version").press("Enter")
    page.get_by_text("1 of 2").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Later version"


def test_an_answer_is_copied(page: Page) -> None:
    answer_with(page, "**Copy** me.")
    ask(page, "Write.")
    page.get_by_role("button", name="Copy this answer").click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**Copy** me."


def test_the_keyboard_reaches_everything_in_order(page: Page) -> None:
    answer_with(page, "Yes.")
    ask(page, "one")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    assert page.input_value("#question") == "two\nlines"
    page.locator(".skip-link").focus()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                    const at = document.activeElement;
                    const outline = getComputedStyle(at).outlineStyle;
                    const box = at.closest(".box");
                    const seen = outline !== "none" || (box && getComputedStyle(box).boxShadow !== "none");
                    const name = at.getAttribute("aria-label") || at.id || at.innerText;
                    return [name.trim().split("\\n")[0], Boolean(seen)];
                }"""
            )
        )
        if reached[-1][0] == "forget-key":
            break
    names = [name for name, _ in reached]
    order = ["Conversations", "model", "new", "Edit this question", "Copy this answer", "question", "attach"]
    labels = {"attach": "Attach images, PDF files or a video"}
    places = [names.index(labels.get(name, name)) for name in (*order, "Send", "method", "forget-key")]
    assert places == sorted(places)
    assert [name for name, seen in reached if not seen] == []


def test_it_fits_a_phone(browser: Browser, server: Server) -> None:
    with browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True) as context:
        watch = Watch(context, server.url)
        page = context.new_page()
        page.goto(server.url)
        page.locator("#status .dot.ok").wait_for()
        answer_with(
            page,
            f"| {' | '.join('abcdefgh')} |\n|{'-|' * 8}\n| {' | '.join(['wide words'] * 8)} |\n\n{'x' * 200}",
        )
        paste_file(page, EXAMPLES / "page.png")
        ask(page, "What is " + "long" * 40)
        for open_panel in (None, "Conversations", "Options"):
            if open_panel:
                page.locator(".topbar").get_by_role("button", name=open_panel).click()
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, open_panel
        assert page.locator("#sidebar").is_hidden()
        page.keyboard.press("Escape")
        assert page.locator("#options").is_hidden()
        page.locator(".question .thumb").click()
        page.locator("#viewer[open]").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        watch.check(page)


def test_nothing_moves_for_those_who_want_no_motion(page: Page) -> None:
    moving = "document.getAnimations().length + [...document.querySelectorAll('*')].filter("
    moving += "(each) => parseFloat(getComputedStyle(each).transitionDuration) > 0).length"
    assert page.evaluate(moving) > 0
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(moving) == 0


def test_the_theme_is_chosen_and_kept(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    button = page.locator("#theme")
    button.click()
    button.click()
    assert button.get_attribute("aria-label") == "Theme: dark"
    assert page.evaluate(colour) != light
    opened(page, page.url)
    assert page.evaluate(colour) != light


def test_a_line_of_any_length_is_shown_without_a_freeze(browser: Browser, server: Server) -> None:
    """The search for the end of a heading took a time that grew with the square of the line."""
    with browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        page.goto(server.url)
        tags = page.evaluate(
            """async (lengths) => {
              const { markdown } = await import("/ui/markdown.js");
              const line = (length) => "# " + "\\r".repeat(length) + "a\\rx";
              return lengths.map((length) => markdown(line(length)).firstChild.tagName);
            }""",
            [10, 6000, 1_000_000],
        )
    assert tags == ["P", "P", "P"]
