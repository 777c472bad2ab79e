"""/v1/files and /v1/batches: requests in a file, answered in the background, and their results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from fovea.api.content import NO_EFFECT
from fovea.api.wire import Body, Word
from fovea.core.errors import InvalidRequest, NotFound, PayloadTooLarge
from fovea.server.batch_runner import ENDPOINTS, BatchRunner, batch_list
from fovea.server.batch_store import BatchStore, public, writing
from fovea.server.request import Request
from fovea.server.routing import Routes
from fovea.server.state import ServerState

routes = Routes()
PURPOSES = ("batch", "batch_output", "user_data", "assistants", "vision", "evals", "fine-tune")
PIECE = 1 << 20
FORM = 64 * 1024
"""Bytes that a form may have beside its file."""
LONGEST_NAME = 255
LONGEST_FIELD = 4096
MOST_PARTS = 9
"""Parts of a form: its file and some fields."""
_UPLOAD = {
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
}


@routes.post("/v1/files", upload=_UPLOAD)
async def upload(request: Request) -> dict[str, Any]:
    """Store a file. Batches read their requests from files, a line of JSON each."""
    state = request.state
    store = store_of(state)
    most = state.settings.batches.batch_file_mib << 20
    _check_length(request, most, store)
    path = store.new_upload()
    try:
        with store.arrival() as arrived, writing(), path.open("wb") as target:
            form = await _receive(request, target, most, arrived)
        record = store.add_file(path, request.caller.holder, filename=form.filename, purpose=form.purpose)
    finally:
        path.unlink(missing_ok=True)
    return public(record)


class FilePage(BaseModel):
    """A page of the list of files."""

    limit: int = Field(10_000, ge=1, le=10_000, description="Most files.")
    after: str | None = Field(None, description="Id of the last file of the page before.")
    purpose: str | None = Field(None, description="Only files with this purpose.")


@routes.get("/v1/files", query=FilePage)
async def files(request: Request, page: FilePage) -> dict[str, Any]:
    """List the files, newest first."""
    state = request.state
    records = store_of(state).files(request.caller.holder)
    wanted = [public(record) for record in records if page.purpose in (None, record["purpose"])]
    return batch_list(wanted, page.limit, page.after)


@routes.get("/v1/files/{name}")
async def file(request: Request, name: str) -> dict[str, Any]:
    """Describe a file."""
    state = request.state
    return public(store_of(state).file(name, request.caller.holder))


@routes.get("/v1/files/{name}/content")
async def content(request: Request, name: str) -> None:
    """Return the content of a file."""
    state = request.state
    store = store_of(state)
    record = store.file(name, request.caller.holder)
    with store.content_path(name).open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        filename = quote(record["filename"])
        disposition = f"attachment; filename*=UTF-8''{filename}"
        headers = {"content-type": "application/jsonl", "content-length": str(size)}
        await request.start(200, {**headers, "content-disposition": disposition})
        while piece := await asyncio.to_thread(source.read, PIECE):
            await request.write(piece)
    await request.write(b"", more=False)


@routes.delete("/v1/files/{name}")
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Remove a file. One that an unfinished batch reads cannot be removed."""
    state = request.state
    store = store_of(state)
    store.file(name, request.caller.holder)
    user = next((batch for batch in store.unfinished() if batch["input_file_id"] == name), None)
    if user is not None:
        raise InvalidRequest(f"the batch {user['id']} still reads this file; cancel it first")
    store.drop_file(name, request.caller.holder)
    return {"id": name, "object": "file", "deleted": True}


def store_of(state: ServerState) -> BatchStore:
    """The store of files and batches. Raises NotFound if the server has none."""
    if state.batches is None:
        raise NotFound(
            "files and batches are not kept here: the server was started without --batch-dir",
            code="batches_off",
        )
    return state.batches


def _check_length(request: Request, most: int, store: BatchStore) -> None:
    """Refuse a body by its length, if it states one, before any of it is read."""
    length = request.header(b"content-length")
    if not length.isdecimal() or len(length) > 15:
        return
    if int(length) > most + FORM:
        raise PayloadTooLarge(
            f"the file has about {int(length)} bytes; accepted: at most {most} (batch_file_mib)", param="file"
        )
    store.check_room(int(length))


async def _receive(request: Request, target: IO[bytes], most: int, arrived: Callable[[int], None]) -> _Form:
    """Receive the form of an upload, and write its file to `target`.

    most: bytes of the file. arrived: called with the bytes of each part of the body.
    Raises InvalidRequest, PayloadTooLarge, ClientGone, and what `arrived` raises.
    """
    form = _Form(target, most)
    try:
        kind, options = parse_options_header(request.header(b"content-type"))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise FormParserError("it has no boundary")
        parser = MultipartParser(options[b"boundary"], form.callbacks)  # type: ignore[arg-type]
        left, more = most + FORM, True
        while more:
            message = await request.receive()
            data, more = message.get("body", b""), message.get("more_body", False)
            left -= len(data)
            if left < 0:
                raise PayloadTooLarge(
                    f"the form has more than {most + FORM} bytes (batch_file_mib)", param="file"
                )
            arrived(len(data))
            parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(
            f"the body is not a form: {str(error)[:200]}; accepted: multipart/form-data", param="file"
        ) from None
    request.watch()
    form.check()
    return form


class _Form:
    """The form of an upload.

    filename, purpose: as sent.
    """

    def __init__(self, target: IO[bytes], most: int) -> None:
        self.filename = ""
        self.purpose = ""
        self.callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
        }
        self._target = target
        self._most = most
        self._size = 0
        self._parts = 0
        self._has_file = False
        self._header, self._value = b"", b""
        self._field = ""
        self._text = bytearray()

    def check(self) -> None:
        """Raise InvalidRequest if the form is not complete."""
        if self.purpose not in PURPOSES:
            raise InvalidRequest(
                f"purpose is {self.purpose!r:.50}; accepted: {', '.join(PURPOSES)}", param="purpose"
            )
        if not self._has_file:
            raise InvalidRequest("file is required, as a part of the form", param="file")

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise FormParserError(f"it has more than {MOST_PARTS} parts")
        self._field, self._text = "", bytearray()

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._field = _text(options.get(b"name", b""))
            if self._field == "file" and b"filename" in options:
                if self._has_file:
                    raise FormParserError("it has several files")
                name = Path(_text(options[b"filename"]) or "file").name[:LONGEST_NAME]
                self.filename, self._has_file = name.encode("utf-8", "replace").decode(), True
        self._header, self._value = b"", b""

    def _begin_content(self) -> None:
        if not self._field:
            raise FormParserError("a part of it has no name")

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file" and self._has_file:
            self._size += end - start
            if self._size > self._most:
                raise PayloadTooLarge(
                    f"the file has more than {self._most} bytes (batch_file_mib)", param="file"
                )
            self._target.write(memoryview(data)[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > LONGEST_FIELD:
            raise FormParserError(f"its field {self._field[:50]!r} has more than {LONGEST_FIELD} bytes")

    def _end_part(self) -> None:
        if self._field == "purpose":
            self.purpose = _text(bytes(self._text))


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the form's names cannot be read; accepted: UTF-8", param="file") from None


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
async def create_batch(request: Request, body: BatchRequest) -> dict[str, Any]:
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
async def cancel_batch(request: Request, name: str) -> dict[str, Any]:
    """End a batch. The answers that it has by then stay."""
    state = request.state
    record = store_of(state).batch(name, request.caller.holder)
    return public(_runner(state).cancel(record))


def _runner(state: ServerState) -> BatchRunner:
    assert state.runner is not None  # it is made with the store
    return state.runner
