"""/v1/files: files for batches, and their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.types import Message

from fovea.core.errors import InvalidRequest, NotFound, PayloadTooLarge
from fovea.http.refusals import ClientGone
from fovea.server.batch_runner import batch_list
from fovea.server.batch_store import BatchStore, public, writing
from fovea.server.docs import ERRORS, NAMED
from fovea.server.state import ServerState, state_of

router = APIRouter()
PURPOSES = ("batch", "batch_output", "user_data", "assistants", "vision", "evals", "fine-tune")
PIECE = 1 << 20
FORM = 64 * 1024
"""Bytes that a form may have beside its file."""
LONGEST_NAME = 255
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", responses=ERRORS, openapi_extra=_UPLOAD)
async def upload(http: Request) -> dict[str, Any]:
    """Store a file. Batches read their requests from files, a line of JSON each."""
    state = state_of(http)
    store = store_of(state)
    most = state.settings.batches.batch_file_mib << 20
    _check_length(http, most, store)
    path = store.new_upload()
    try:
        with store.arrival() as arrived:
            limited = Request(http.scope, _limited(http, most + FORM, arrived))
            name, purpose = await _receive(limited, path, most)
        record = store.add_file(path, state.caller.holder, filename=name, purpose=purpose)
    except MultiPartException as error:
        raise InvalidRequest(f"the body is no form: {error.message[:200]}") from None
    except (ValueError, LookupError):  # of names in a charset that cannot be read
        raise InvalidRequest("the form's names cannot be read; accepted: UTF-8", param="file") from None
    finally:
        path.unlink(missing_ok=True)
    return public(record)


@router.get("/v1/files", responses=NAMED)
async def files(
    http: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: str | None = None,
    purpose: str | None = None,
) -> dict[str, Any]:
    """List the files, newest first."""
    state = state_of(http)
    records = store_of(state).files(state.caller.holder)
    wanted = [public(record) for record in records if purpose in (None, record["purpose"])]
    return batch_list(wanted, limit, after)


@router.get("/v1/files/{name}", responses=NAMED)
async def file(name: str, http: Request) -> dict[str, Any]:
    """Describe a file."""
    state = state_of(http)
    return public(store_of(state).file(name, state.caller.holder))


@router.get("/v1/files/{name}/content", responses=NAMED, response_class=Response)
async def content(name: str, http: Request) -> Response:
    """Return the content of a file."""
    state = state_of(http)
    store = store_of(state)
    record = store.file(name, state.caller.holder)
    return FileResponse(store.content_path(name), filename=record["filename"], media_type="application/jsonl")


@router.delete("/v1/files/{name}", responses=NAMED)
async def delete(name: str, http: Request) -> dict[str, Any]:
    """Remove a file. One that an unfinished batch reads cannot be removed."""
    state = state_of(http)
    store = store_of(state)
    store.file(name, state.caller.holder)
    user = next((batch for batch in store.unfinished() if batch["input_file_id"] == name), None)
    if user is not None:
        raise InvalidRequest(f"the batch {user['id']} still reads this file; cancel it first")
    store.drop_file(name, state.caller.holder)
    return {"id": name, "object": "file", "deleted": True}


def store_of(state: ServerState) -> BatchStore:
    """The store of files and batches. Raises NotFound if the server has none."""
    if state.batches is None:
        raise NotFound(
            "files and batches are not kept here: the server was started without --batch-dir",
            code="batches_off",
        )
    return state.batches


def _check_length(http: Request, most: int, store: BatchStore) -> None:
    """Refuse a body by its length, if it states one, before any of it is read."""
    length = http.headers.get("content-length", "")
    if not length.isdecimal() or len(length) > 15:
        return
    if int(length) > most + FORM:
        raise PayloadTooLarge(
            f"the file has about {int(length)} bytes; accepted: at most {most} (batch_file_mib)", param="file"
        )
    store.check_room(int(length))


def _limited(http: Request, most: int, arrived: Callable[[int], None]) -> Any:
    """A `receive` that raises PayloadTooLarge after so many bytes. arrived: called with each part's bytes."""
    left = most

    async def receive() -> Message:
        nonlocal left
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        left -= len(message.get("body", b""))
        if left < 0:
            raise PayloadTooLarge(f"the form has more than {most} bytes (batch_file_mib)", param="file")
        arrived(len(message.get("body", b"")))
        return message

    return receive


async def _receive(http: Request, path: Path, most: int) -> tuple[str, str]:
    """Read the form of an upload, and write its file. Returns the file's name and its purpose."""
    async with http.form(max_files=1, max_fields=8, max_part_size=4096) as form:
        purpose, file = form.get("purpose"), form.get("file")
        if purpose not in PURPOSES:
            raise InvalidRequest(
                f"purpose is {purpose!r:.50}; accepted: {', '.join(PURPOSES)}", param="purpose"
            )
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file is required, as a part of the form", param="file")
        if (file.size or 0) > most:
            raise PayloadTooLarge(
                f"the file has {file.size} bytes; accepted: at most {most} (batch_file_mib)", param="file"
            )
        with writing(), path.open("wb") as target:
            while piece := await file.read(PIECE):
                target.write(piece)
        name = Path(file.filename or "file").name[:LONGEST_NAME]
        return name.encode("utf-8", "replace").decode(), str(purpose)
