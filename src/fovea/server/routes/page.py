"""/, /admin and /ui: pages in the browser, for people who use the model and for those who run the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.api.explain import shorten
from fovea.core.errors import NotFound
from fovea.server.page.files import ADMIN, HEADERS, INDEX, PageFile, read_folder

router = APIRouter(include_in_schema=False)


@cache
def read_files() -> Mapping[str, PageFile]:
    """Return the files of the page. They are read once, when the server starts."""
    return read_folder()


@router.api_route("/", methods=["GET", "HEAD"])
async def index(http: Request) -> Response:
    """Send the page."""
    return send_file(http, INDEX)


@router.api_route("/admin", methods=["GET", "HEAD"])
async def admin(http: Request) -> Response:
    """Send the page for operators. It needs a key only for what it asks /admin/live for."""
    return send_file(http, ADMIN)


@router.api_route("/ui/{name}", methods=["GET", "HEAD"])
async def part(name: str, http: Request) -> Response:
    """Send a file of the page."""
    return send_file(http, name)


def send_file(http: Request, name: str) -> Response:
    """Return the response with a file of the page; status 304 if the browser has it already.

    Raises NotFound for a name that is not in the table.
    """
    file = read_files().get(name)
    if file is None:
        raise NotFound(f"the page has no file {shorten(name)}", code="unknown_url")
    headers = {**HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
