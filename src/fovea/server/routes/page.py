"""/, /admin and /ui: pages in the browser, for people who use the model and for those who run the server."""

from __future__ import annotations

from fovea.http.page import INDEX, SERVER_ADMIN, send_file
from fovea.server.request import Request
from fovea.server.routing import Routes

routes = Routes()


@routes.page("/")
async def index(request: Request) -> None:
    """Send the page."""
    await send_file(request, INDEX)


@routes.page("/admin")
async def admin(request: Request) -> None:
    """Send the page for operators. It needs a key only for what it asks /admin/live for."""
    await send_file(request, SERVER_ADMIN)


@routes.page("/ui/{name}")
async def part(request: Request, name: str) -> None:
    """Send a file of the page."""
    await send_file(request, name)
