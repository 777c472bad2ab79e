"""/, /admin and /ui: pages in the browser, for people who use the model and for those who run the server.

Their files are a fixed table, read once. A request can name nothing outside of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fovea.api.explain import shorten
from fovea.core.errors import ConfigError, NotFound
from fovea.server.request import Request
from fovea.server.routing import Response, Routes

FOLDER = Path(__file__).parents[1] / "static"
INDEX = "index.html"
ADMIN_PAGE = "admin.html"
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
    """One file of the page. etag: the header by which a browser knows that its copy is the newest one."""

    body: bytes
    media_type: str
    etag: str


def read_folder(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Return all files of a folder by their names. Raises ConfigError if a page itself is missing."""
    files = {path.name: _read(path) for path in sorted(folder.glob("*")) if path.suffix in TYPES}
    for name in (INDEX, ADMIN_PAGE):
        if name not in files:
            raise ConfigError(
                f"the page's file {folder / name} is missing; accepted: a complete installation, or page off",
                param="page",
            )
    return files


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


routes = Routes()


@cache
def read_files() -> Mapping[str, PageFile]:
    """Return the files of the page. They are read once, when the server starts."""
    return read_folder()


@routes.page("/")
async def index(request: Request) -> Response:
    """Send the page."""
    return send_file(request, INDEX)


@routes.page("/admin")
async def admin(request: Request) -> Response:
    """Send the page for operators. It needs a key only for what it asks /admin/live for."""
    return send_file(request, ADMIN_PAGE)


@routes.page("/ui/{name}")
async def part(request: Request, name: str) -> Response:
    """Send a file of the page."""
    return send_file(request, name)


def send_file(request: Request, name: str) -> Response:
    """Return the response with a file of the page; status 304 if the browser has it already.

    Raises NotFound for a name that is not in the table.
    """
    file = read_files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {shorten(name)}", code="unknown_url")
    headers = {**HEADERS, "etag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.header(b"if-none-match").split(",")}
    if file.etag in known:
        return Response(status=304, headers=headers)
    return Response(file.body, file.media_type, headers=headers)
