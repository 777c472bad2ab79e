"""The files of the pages in the browser, which the server and the gateway send.

They are a fixed table, read once. A request can name nothing outside of it. They are the same for everyone
and hold no secrets: what they show, they ask of the API with a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fovea.api.explain import shorten
from fovea.core.errors import ConfigError, NotFound
from fovea.http.exchange import Exchange

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
SERVER_ADMIN, GATEWAY_ADMIN = "admin.html", "gateway.html"
PATHS = ("/", "/admin")
PART = "/ui/"
"""Paths of the files of the pages begin so."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; media-src blob:; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self)",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The names of the files never change, so a browser asks each time whether it has the newest one.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the pages. etag: the header by which a browser knows that its copy is the newest one."""

    body: bytes
    media_type: str
    etag: str


def is_page(path: str) -> bool:
    """Whether a path is a page for people or a file of one. The figures that /admin shows are none."""
    return path in PATHS or path.startswith(PART)


def read_folder(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Return all files of a folder by their names. Raises ConfigError if a page itself is missing."""
    files = {path.name: _read(path) for path in sorted(folder.glob("*")) if path.suffix in TYPES}
    for name in (INDEX, SERVER_ADMIN, GATEWAY_ADMIN):
        if name not in files:
            raise ConfigError(
                f"the page's file {folder / name} is missing; accepted: a complete installation, or page off",
                param="page",
            )
    return files


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


@cache
def read_files() -> Mapping[str, PageFile]:
    """Return the files of the pages. They are read once, when the process starts."""
    return read_folder()


async def send_file(exchange: Exchange, name: str) -> None:
    """Send a file of the pages, or status 304 if the browser has it already.

    Raises NotFound for a name that is not in the table.
    """
    file = read_files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {shorten(name)}", code="unknown_url")
    headers = {**HEADERS, "etag": file.etag, "content-type": file.media_type}
    known = {tag.strip().removeprefix("W/") for tag in exchange.header(b"if-none-match").split(",")}
    if file.etag in known:
        await exchange.reply(304, b"", headers)
    else:
        await exchange.reply(200, file.body, headers)
