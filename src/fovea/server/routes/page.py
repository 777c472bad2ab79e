"""/, /admin and /ui: pages in the browser, for people who use the model and for those who run the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.server.page.files import ADMIN, HEADERS, INDEX, PageFile, read_folder
from fovea.server.request import Request
from fovea.server.routing import Response, Routes

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
    return send_file(request, ADMIN)


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
