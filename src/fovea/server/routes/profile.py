"""/admin/profile: a profile of the running server."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fovea.observe.profiler import FORMATS, ProfileOptions
from fovea.server.answer import while_connected
from fovea.server.docs import NAMED
from fovea.server.state import state_of

router = APIRouter()


@router.get("/admin/profile", responses=NAMED, response_class=Response)
async def profile(http: Request) -> Response:
    """Profile the server for some seconds with py-spy, as a flame graph or in another format."""
    options = ProfileOptions.of(dict(http.query_params))
    recording = await while_connected(http, state_of(http).profiler.profile(options))
    return Response(recording, media_type=FORMATS[options.form], headers={"cache-control": "no-store"})
