"""The page at /: its headers, its files, and who may read them. A browser opens it in tests/page."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from fovea.http.page import FOLDER, TYPES, read_folder
from fovea.server.app import create_app
from fovea.server.run import serving
from fovea.server.settings import AccessSettings, ServerSettings
from tests.server.scripted import Script

LARGEST = 300 * 1024
ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)


@contextlib.contextmanager
def client(**settings: object) -> Iterator[httpx.Client]:
    app = create_app(Script(), ServerSettings.of(**settings))
    with serving(app, uvloop.new_event_loop) as url, httpx.Client(base_url=url, trust_env=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def open_client() -> Iterator[httpx.Client]:
    with client() as opened:
        yield opened


def test_the_page_comes_with_a_strict_policy(open_client: httpx.Client) -> None:
    answer = open_client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["permissions-policy"] == "camera=(self)"


def test_every_file_is_sent_with_its_type_and_checked_by_its_tag(open_client: httpx.Client) -> None:
    for path in FILES:
        answer = open_client.get(f"/ui/{path.name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == TYPES[path.suffix]
        assert answer.headers["cache-control"] == "no-cache"
        again = open_client.get(
            f"/ui/{path.name}", headers={"If-None-Match": f'"x", {answer.headers["etag"]}'}
        )
        assert (again.status_code, again.content) == (304, b"")
        other = open_client.get(f"/ui/{path.name}", headers={"If-None-Match": '"x"'})
        assert other.status_code == 200


def test_head_has_the_headers_alone(open_client: httpx.Client) -> None:
    head, get = open_client.head("/"), open_client.get("/")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["etag"] == get.headers["etag"]
    assert head.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize("name", ["missing.js", "..%2f__init__.py", "files.py", "%2e%2e", ".", "a%00b"])
def test_nothing_else_can_be_read(open_client: httpx.Client, name: str) -> None:
    answer = open_client.get(f"/ui/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_other_methods_are_refused(open_client: httpx.Client) -> None:
    answer = open_client.post("/", json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_the_page_needs_no_key_and_the_api_does() -> None:
    with client(api_keys=("secret",), admin_keys=("other",)) as closed:
        assert closed.get("/").status_code == 200
        assert closed.get("/ui/app.js").status_code == 200
        assert closed.get("/v1/models").status_code == 401
        assert closed.get("/ui").status_code == 401
        assert closed.get("/uix").status_code == 401


def test_the_page_can_be_turned_off() -> None:
    with client(page="off") as without:
        assert without.get("/").status_code == 404
        assert without.get("/ui/app.js").status_code == 404
    with client(page="off", api_keys=("secret",)) as closed:
        assert closed.get("/").status_code == 401
    assert AccessSettings().page == "on"


def test_the_page_is_small_and_names_no_other_host() -> None:
    """Addresses of other hosts appear only as names of XML, which nothing requests."""
    assert sum(path.stat().st_size for path in FILES) <= LARGEST
    for path in FILES:
        text = path.read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
        assert addresses <= {"http://www.w3.org"}, path.name
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
        assert "eval(" not in text


def test_every_file_that_is_named_exists() -> None:
    files = read_folder()
    for name, file in files.items():
        text = file.body.decode()
        named = re.findall(r'from "\./([\w.]+)"', text) + re.findall(r'"ui/([\w.]+)"', text)
        assert set(named) <= set(files), name


def test_html_has_neither_scripts_nor_styles_of_its_own() -> None:
    """The policy would stop them."""
    for path in FOLDER.glob("*.html"):
        text = path.read_text()
        assert not re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", text), path.name


def test_figures_of_the_slider_are_those_that_were_measured() -> None:
    figures = json.loads((FOLDER / "budget.json").read_text())
    page = (ROOT / figures["source"]).read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    table = {row[0]: row for row in lines if len(row) == 9 and "(" in row[1]}
    shown = {"full": figures["full"]} | {
        f"{method} {share}": row for method, rows in figures["methods"].items() for share, row in rows.items()
    }
    assert len(shown) == 10
    for setting, row in shown.items():
        measured = [float(cell.split()[0]) for cell in table[setting][1:]]
        assert row == {
            "small_details": measured[0],
            "others": measured[1],
            "all": measured[2],
            "visual_tokens": measured[3],
            "ttft_ms": measured[4],
            "encoder_ms": measured[6],
        }, setting
