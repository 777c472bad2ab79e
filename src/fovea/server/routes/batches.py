"""/v1/batches: requests in a file, answered in the background."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from fovea.api.content import NO_EFFECT
from fovea.api.wire import Body, Word
from fovea.server.batch_runner import ENDPOINTS, BatchRunner, batch_list
from fovea.server.batch_store import public
from fovea.server.request import Request
from fovea.server.routes.files import store_of
from fovea.server.routing import Routes
from fovea.server.state import ServerState

routes = Routes()


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


@routes.post("/v1/batches", bodies=(BatchRequest,))
async def create(request: Request, body: BatchRequest) -> dict[str, Any]:
    """Begin to answer the requests of a file in the background."""
    state = request.state
    file = store_of(state).file(body.input_file_id, request.caller.holder, "input_file_id")
    return public(_runner(state).create(request.caller.holder, file, body.endpoint, body.metadata))


class BatchPage(BaseModel):
    """A page of the list of batches."""

    limit: int = Field(20, ge=1, le=100, description="Most batches.")
    after: str | None = Field(None, description="Id of the last batch of the page before.")


@routes.get("/v1/batches", query=BatchPage)
async def batches(request: Request, page: BatchPage) -> dict[str, Any]:
    """List the batches, newest first."""
    state = request.state
    records = [public(record) for record in store_of(state).batches(request.caller.holder)]
    return batch_list(records, page.limit, page.after)


@routes.get("/v1/batches/{name}")
async def batch(request: Request, name: str) -> dict[str, Any]:
    """Describe a batch: how far it is, and the files of its results when it has ended."""
    state = request.state
    return public(store_of(state).batch(name, request.caller.holder))


@routes.post("/v1/batches/{name}/cancel")
async def cancel(request: Request, name: str) -> dict[str, Any]:
    """End a batch. The answers that it has by then stay."""
    state = request.state
    record = store_of(state).batch(name, request.caller.holder)
    return public(_runner(state).cancel(record))


def _runner(state: ServerState) -> BatchRunner:
    assert state.runner is not None  # it is made with the store
    return state.runner
