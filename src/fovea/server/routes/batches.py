"""/v1/batches: requests in a file, answered in the background."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from fovea.api.content import NO_EFFECT
from fovea.api.wire import Body, Word
from fovea.server.batch_runner import ENDPOINTS, BatchRunner, batch_list
from fovea.server.batch_store import public
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS, NAMED
from fovea.server.routes.files import store_of
from fovea.server.state import ServerState, state_of

router = APIRouter(route_class=BodyRoute)


class BatchRequest(Body):
    """A request to answer all requests of a file."""

    input_file_id: Word = Field(description="A file of /v1/files, with one request as JSON on each line.")
    endpoint: Literal[ENDPOINTS] = Field(description="The route of all requests of the file.")  # type: ignore[valid-type]
    completion_window: Literal["24h"] = Field(
        default="24h", description="A batch ends after this time, complete or not."
    )
    metadata: dict[Word, Word] | None = Field(
        default=None, max_length=16, description="Returned with the batch."
    )
    output_expires_after: dict[Word, Any] | None = Field(default=None, description=NO_EFFECT)


@router.post("/v1/batches", responses=ERRORS)
async def create(body: BatchRequest, http: Request) -> dict[str, Any]:
    """Begin to answer the requests of a file in the background."""
    state = state_of(http)
    file = store_of(state).file(body.input_file_id, state.caller.holder, "input_file_id")
    return public(_runner(state).create(state.caller.holder, file, body.endpoint, body.metadata))


@router.get("/v1/batches", responses=NAMED)
async def batches(
    http: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """List the batches, newest first."""
    state = state_of(http)
    records = [public(record) for record in store_of(state).batches(state.caller.holder)]
    return batch_list(records, limit, after)


@router.get("/v1/batches/{name}", responses=NAMED)
async def batch(name: str, http: Request) -> dict[str, Any]:
    """Describe a batch: how far it is, and the files of its results when it has ended."""
    state = state_of(http)
    return public(store_of(state).batch(name, state.caller.holder))


@router.post("/v1/batches/{name}/cancel", responses=NAMED)
async def cancel(name: str, http: Request) -> dict[str, Any]:
    """End a batch. The answers that it has by then stay."""
    state = state_of(http)
    record = store_of(state).batch(name, state.caller.holder)
    return public(_runner(state).cancel(record))


def _runner(state: ServerState) -> BatchRunner:
    assert state.runner is not None  # it is made with the store
    return state.runner
