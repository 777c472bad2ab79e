"""Answers the requests of batches in the background, some at a time, and goes on after a restart.

Each client's batches run one after the other, and those of all clients beside each other.

A request that is refused with 429 or 503 is sent again until it is answered or the batch ends. Answers are
appended to files as they come, in any order. After a restart, the requests without an answer follow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.api.cutter import Cut, Cutter
from fovea.api.wire import check_count
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.json_text import is_blank, parse_object
from fovea.server.batch_store import OWNER, BatchStore, Record, read_lines
from fovea.server.clients import Caller
from fovea.server.request import Reply

log = logging.getLogger("fovea.server")
Call = Callable[[str, bytes, Caller, str], Awaitable[Reply]]
"""Answers a request from within: `App.call`, with its path, its body, who sends it, and its id."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_LINES = 50_000
MOST_ERRORS = 50
"""Most wrong lines that a batch names."""
LONGEST_ID = 256
LONGEST_LINE = 16 * 1024 * 1024
SLICE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    id: the client's name of it, unique in the batch.
    body: of the request, as JSON.
    """

    id: str
    body: bytes


def parse_line(text: bytes, endpoint: str) -> Line:
    """Read a line. Raises InvalidRequest, which says what is wrong with it.

    Long strings are cut out before it is parsed, as in bodies of requests, and put back unchanged.
    """
    if len(text) > LONGEST_LINE:
        raise InvalidRequest(f"the line has more than {LONGEST_LINE} bytes")
    cutter = Cutter()
    for at in range(0, len(text), SLICE):
        cutter.feed(text[at : at + SLICE])
    cut = cutter.finish()
    value = parse_object(bytes(cut.skeleton))
    check_count(value)
    name = value.get("custom_id")
    if not isinstance(name, str) or name in cut.strings or not 0 < len(name) <= LONGEST_ID:
        raise InvalidRequest(
            f"custom_id is required, a text of up to {LONGEST_ID} characters", param="custom_id"
        )
    if value.get("method") != "POST":
        raise InvalidRequest(f"method is {value.get('method')!r:.40}; accepted: 'POST'", param="method")
    if value.get("url") != endpoint:
        raise InvalidRequest(
            f"url is {value.get('url')!r:.80}; accepted: {endpoint!r}, the endpoint of the batch", param="url"
        )
    body = value.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body is required, an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("body.stream: answers of a batch are not streamed", param="body.stream")
    return Line(name, _with_strings(json.dumps(body).encode(), cut))


def _with_strings(text: bytes, cut: Cut) -> bytes:
    """Put the strings that were cut out back into a JSON text."""
    if not cut.strings:
        return text
    names = cut.strings
    return re.sub(rb'"([0-9a-f]{32}:\d+)"', lambda match: _quoted(match, names), text)


def _quoted(match: re.Match[bytes], strings: Mapping[str, bytearray]) -> bytes:
    string = strings.get(match[1].decode())
    return match[0] if string is None else b'"' + bytes(string) + b'"'


def check_lines(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """Check all lines of a file. Returns their number, and what is wrong with the wrong ones."""
    count, names = 0, set()
    errors: list[dict[str, Any]] = []

    def note(number: int, code: str, message: str, param: str | None = None) -> None:
        errors.append({"code": code, "line": number, "message": message, "param": param})

    for number, text in enumerate(read_lines(path, LONGEST_LINE + 2), 1):
        if is_blank(text):
            continue
        count += 1
        if count > MAX_LINES:
            note(number, "too_many_lines", f"the file has more than {MAX_LINES} requests")
        else:
            try:
                line = parse_line(text, endpoint)
                if line.id in names:
                    note(
                        number, "duplicate_custom_id", f"custom_id {line.id[:64]!r} occurs twice", "custom_id"
                    )
                names.add(line.id)
            except InvalidRequest as error:
                note(number, "invalid_line", error.message, error.param)
        if len(errors) >= MOST_ERRORS or count > MAX_LINES:
            break
    if not count:
        note(1, "empty_file", "the file has no requests")
    return count, errors


def result_line(line_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer."""
    head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line_id}
    response = f'{{"status_code":{status},"request_id":{json.dumps(request_id)},"body":'.encode()
    return json.dumps(head)[:-1].encode() + b',"response":' + response + body + b'},"error":null}\n'


def answered_ids(path: Path) -> set[str]:
    """The names of the requests that a file of results has."""
    return {json.loads(text)["custom_id"] for text in read_lines(path) if text}


DAY_S = 86_400
BUSY = (429, 503)
"""Statuses of answers after which a request is tried again."""
RETRY_S = 2.0


class BatchRunner:
    """Runs the batches of one server. For the event loop's thread.

    call: answers one request.
    caller_of: returns a new caller for a client's name; None: its key is gone.
    parallel: requests that are answered at a time, of all clients together.
    """

    def __init__(
        self, call: Call, store: BatchStore, caller_of: Callable[[str], Caller | None], parallel: int
    ) -> None:
        self._send = call
        self._store = store
        self._caller_of = caller_of
        self._parallel = parallel
        self._news = asyncio.Event()
        self._places = asyncio.Semaphore(parallel)

    def create(self, owner: str, file: Record, endpoint: str, metadata: dict[str, str] | None) -> Record:
        """Begin a batch, and return it."""
        now = int(time.time())
        record: Record = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file["id"],
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + DAY_S,
            "in_progress_at": None,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            OWNER: owner,
        }
        self._store.add_batch(record)
        self._news.set()
        return record

    def cancel(self, record: Record) -> Record:
        """End a batch; what is being answered is finished. Raises InvalidRequest if it has ended."""
        if record["status"] not in ("validating", "in_progress", "cancelling"):
            raise InvalidRequest(f"the batch is {record['status']}, so it cannot be cancelled")
        self._mark(record, "cancelling")
        return record

    async def run(self) -> None:
        """Run the batches of each client one after the other, all clients beside each other.

        It ends when it is cancelled.
        """
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._news.clear()
                for record in self._store.unfinished():
                    owner = record[OWNER]
                    if owner not in running or running[owner].done():
                        running[owner] = asyncio.create_task(self._run_all(owner))
                await self._news.wait()
        finally:
            for task in running.values():
                task.cancel()

    async def _run_all(self, owner: str) -> None:
        """Run the batches of a client that have not ended. An error ends one batch alone."""
        while True:
            record = next((one for one in self._store.unfinished() if one[OWNER] == owner), None)
            if record is None:
                self._news.set()  # one may have been added meanwhile
                return
            try:
                await self._run(record)
            except FoveaError as error:
                self._fail(record, error.code or "failed", error.message)
            except Exception as error:  # the other batches go on
                log.error("batch %s failed", record["id"], exc_info=error)
                self._fail(record, "internal_error", "the server failed on this batch; see its log")

    async def _run(self, record: Record) -> None:
        path = self._store.content_path(record["input_file_id"])
        if record["status"] == "validating":
            total, errors = await asyncio.to_thread(check_lines, path, record["endpoint"])
            record["request_counts"]["total"] = total
            if errors:
                record["errors"] = {"object": "list", "data": errors}
                self._mark(record, "failed")
                return
            if record["status"] == "validating":  # it may have been cancelled meanwhile
                self._mark(record, "in_progress")
        if record["status"] != "finalizing":
            await self._answer_all(record)
        expired = record["status"] == "in_progress" and time.time() > record["expires_at"]
        cancelled = record["status"] == "cancelling"
        if not cancelled and not expired:
            self._mark(record, "finalizing")
        self._store.finish_lines(record)
        self._mark(record, "cancelled" if cancelled else "expired" if expired else "completed")

    async def _answer_all(self, record: Record) -> None:
        """Answer all requests that have no answer yet, unless the batch is cancelled or too old."""
        done = await asyncio.to_thread(self._answered, record)
        lines, lock = self._open_lines(record, done), asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._parallel):
                    group.create_task(self._work(record, lines, lock))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _open_lines(self, record: Record, done: set[str]) -> Iterator[Line]:
        """The requests that have no answer yet, as long as the batch goes on."""
        path = self._store.content_path(record["input_file_id"])
        for text in read_lines(path, LONGEST_LINE + 2):
            if record["status"] == "cancelling" or time.time() > record["expires_at"]:
                return
            if not is_blank(text) and (line := parse_line(text, record["endpoint"])).id not in done:
                yield line

    async def _work(self, record: Record, lines: Iterator[Line], lock: asyncio.Lock) -> None:
        """Answer requests, one after the other, until none is left.

        lock: held while a line is read, and while a request that found no room is sent again.
        """
        while True:
            async with lock:
                line = await asyncio.to_thread(next, lines, None)
            if line is None:
                return
            reply = await self._answer(record, line, lock)
            if reply is None:
                return
            good = reply.status == 200
            text = result_line(line.id, reply.status, reply.request_id, reply.body)
            self._store.append(record["id"], "out" if good else "err", text)
            record["request_counts"]["completed" if good else "failed"] += 1

    async def _answer(self, record: Record, line: Line, lock: asyncio.Lock) -> Reply | None:
        """Return the answer to a request; None: the batch has ended before there was room for it."""
        reply = await self._call(record, line)
        if reply.status not in BUSY:
            return reply
        async with lock:  # one at a time, so that the client's other requests find room, too
            while record["status"] != "cancelling" and time.time() < record["expires_at"]:
                await asyncio.sleep(reply.retry_after or RETRY_S)
                reply = await self._call(record, line)
                if reply.status not in BUSY:
                    return reply
        return None

    async def _call(self, record: Record, line: Line) -> Reply:
        """Send a request once. Raises InvalidRequest if the client's key is gone."""
        async with self._places:
            caller = self._caller_of(record[OWNER])
            if caller is None:
                raise InvalidRequest("the key that created the batch is no longer valid", code="key_gone")
            request_id = f"{record['id'][:20]}-{uuid.uuid4().hex[:12]}"
            return await self._send(record["endpoint"], line.body, caller, request_id)

    def _answered(self, record: Record) -> set[str]:
        """The names of the requests that are answered already. Counts them, too."""
        good, bad = (answered_ids(self._store.lines_path(record["id"], kind)) for kind in ("out", "err"))
        record["request_counts"] |= {"completed": len(good), "failed": len(bad)}
        return good | bad

    def _fail(self, record: Record, code: str, message: str) -> None:
        """End a batch with an error. It is ended in memory also if the disk cannot be written."""
        error = {"code": code, "line": None, "message": message, "param": None}
        record["errors"] = {"object": "list", "data": [error]}
        record["status"] = "failed"
        try:
            self._store.finish_lines(record)
            self._mark(record, "failed")
        except Exception as failure:  # such as a full disk
            log.error("the end of batch %s cannot be written", record["id"], exc_info=failure)
            self._store.unname_missing(record)

    def _mark(self, record: Record, status: str) -> None:
        record["status"] = status
        record[f"{status}_at"] = int(time.time())
        self._store.save_batch(record)


def batch_list(records: list[Record], limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list. after: id of the last entry of the page before."""
    ids = [record["id"] for record in records]
    start = ids.index(after) + 1 if after in ids else 0
    page = records[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(records),
    }
