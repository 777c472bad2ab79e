"""/admin/profile: a profile of the running server."""

from __future__ import annotations

from fovea.observe.py_spy import FORMATS, ProfileOptions
from fovea.server.request import Request
from fovea.server.routing import Response, Routes

routes = Routes()


@routes.get("/admin/profile")
async def profile(request: Request) -> Response:
    """Profile the server for some seconds with py-spy, as a flame graph or in another format."""
    options = ProfileOptions.of(request.query)
    request.watch()
    recording = await request.state.profiler.profile(options)
    return Response(recording, FORMATS[options.form], headers={"cache-control": "no-store"})
