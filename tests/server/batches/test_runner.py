"""The runner of batches over an application that answers by a script: failures, retries, restarts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import InvalidRequest, Overloaded, Unavailable
from fovea.server import batch_runner as runner_module
from fovea.server.app import create_app
from fovea.server.batch_runner import BatchRunner, batch_list, check_lines
from fovea.server.batch_store import BatchStore, Record, read_lines
from fovea.server.clients import Caller
from fovea.server.request import Reply
from tests.http.support import LAST
from tests.server.scripted import Script
from tests.server.support import chat

CHAT = "/v1/chat/completions"
Answer = Callable[[str], Awaitable[tuple[int, dict[str, str]]]]
PATIENCE = 20.0


class App:
    """An application that answers each request as a function says, and remembers the texts that it got."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or self._well
        self.texts: list[str] = []
        self.running = self.most = 0

    async def call(self, path: str, body: bytes, caller: Caller, request_id: str) -> Reply:
        text = json.loads(body)["text"]
        self.texts.append(text)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            status, headers = await self.answer(text)
        finally:
            self.running -= 1
        wait = headers.get("retry-after")
        return Reply(status, body, headers.get("x-request-id", ""), None if wait is None else float(wait))

    async def _well(self, text: str) -> tuple[int, dict[str, str]]:
        await asyncio.sleep(0)
        return 200, {"x-request-id": f"id-{text}"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def open_store(folder: Path) -> BatchStore:
    return BatchStore(folder, 1 << 20)


def upload(store: BatchStore, *texts: str) -> Record:
    """A file with a request for every text, which is its name, too."""
    path = store.new_upload()
    values = [{"custom_id": text, "method": "POST", "url": CHAT, "body": {"text": text}} for text in texts]
    path.write_text("\n".join(map(json.dumps, values)))
    return store.add_file(path, "", filename="in.jsonl", purpose="batch")


@asynccontextmanager
async def runner_of(
    store: BatchStore,
    app: App,
    parallel: int = 2,
    caller_of: Callable[[str], Caller | None] = lambda owner: Caller(),
) -> AsyncIterator[BatchRunner]:
    """A runner that runs until the block ends, as abruptly as a server that is stopped."""
    runner = BatchRunner(app.call, store, caller_of, parallel)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(record: Record) -> str:
    await until(lambda: record["status"] in ("completed", "failed", "cancelled", "expired"))
    return str(record["status"])


def results(store: BatchStore, record: Record, field: str = "output_file_id") -> list[Any]:
    """The lines of a file of results; none if there is no file."""
    name = record[field]
    return [json.loads(line) for line in read_lines(store.content_path(name))] if name else []


def ids(entries: list[Any]) -> list[str]:
    return sorted(entry["custom_id"] for entry in entries)


async def test_every_request_is_answered_once(folder: Path) -> None:
    store, app = open_store(folder), App()
    names = [f"n{number}" for number in range(20)]
    async with runner_of(store, app, parallel=3) as runner:
        record = runner.create("", upload(store, *names), CHAT, {"a": "b"})
        assert record["status"] == "validating"
        assert await ended(record) == "completed"
    assert ids(results(store, record)) == sorted(names)
    assert sorted(app.texts) == sorted(names)
    assert app.most <= 3
    assert record["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert record["error_file_id"] is None
    assert record["metadata"] == {"a": "b"}
    for entry in results(store, record):
        assert entry["response"]["body"] == {"text": entry["custom_id"]}
        assert entry["response"]["request_id"] == f"id-{entry['custom_id']}"
    times = ("created_at", "in_progress_at", "finalizing_at", "completed_at")
    assert [record[name] for name in times] == sorted(record[name] for name in times)


async def test_failed_requests_have_a_file_of_their_own(folder: Path) -> None:
    async def answer(text: str) -> tuple[int, dict[str, str]]:
        return (400 if text.startswith("bad") else 500 if text.startswith("broken") else 200), {}

    store = open_store(folder)
    async with runner_of(store, App(answer)) as runner:
        record = runner.create("", upload(store, "a", "bad", "b", "broken"), CHAT, None)
        assert await ended(record) == "completed"
    assert ids(results(store, record)) == ["a", "b"]
    failed = results(store, record, "error_file_id")
    assert {entry["custom_id"]: entry["response"]["status_code"] for entry in failed} == {
        "bad": 400,
        "broken": 500,
    }
    assert record["request_counts"] == {"total": 4, "completed": 2, "failed": 2}


@pytest.mark.parametrize("status", [429, 503])
async def test_request_that_finds_no_room_is_tried_again(folder: Path, status: int) -> None:
    refusals = {"a": 3, "b": 1}

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        left = refusals[text] = refusals[text] - 1
        return (status, {"retry-after": "0"}) if left >= 0 else (200, {})

    store, app = open_store(folder), App(answer)
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a", "b"), CHAT, None)
        assert await ended(record) == "completed"
    assert ids(results(store, record)) == ["a", "b"]
    assert record["request_counts"]["failed"] == 0
    assert sorted(app.texts) == ["a"] * 4 + ["b"] * 2


async def test_wrong_file_fails_with_the_numbers_of_its_lines(folder: Path) -> None:
    store, app = open_store(folder), App()
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a", "b", "a"), CHAT, None)
        assert await ended(record) == "failed"
        other = runner.create("", upload(store, "a"), "/v1/completions", None)
        assert await ended(other) == "failed"
    assert [(error["line"], error["code"]) for error in record["errors"]["data"]] == [
        (3, "duplicate_custom_id")
    ]
    assert [(error["line"], error["param"]) for error in other["errors"]["data"]] == [(1, "url")]
    assert app.texts == []
    assert record["failed_at"] is not None


async def test_batches_run_one_after_the_other(folder: Path) -> None:
    store, app = open_store(folder), App()
    async with runner_of(store, app) as runner:
        records = [runner.create("", upload(store, f"{name}1", f"{name}2"), CHAT, None) for name in "abc"]
        for record in records:
            assert await ended(record) == "completed"
    assert [text[0] for text in app.texts] == list("aabbcc")


async def test_cancelled_batch_keeps_its_answers(folder: Path) -> None:
    """Requests that are being answered are finished, and no further one begins."""
    released = asyncio.Event()

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        await (asyncio.sleep(0) if text == "a" else released.wait())
        return 200, {}

    store, app = open_store(folder), App(answer)
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, *"abcdef"), CHAT, None)
        await until(lambda: app.running == 2)
        assert runner.cancel(record)["status"] == "cancelling"
        released.set()
        assert await ended(record) == "cancelled"
        with pytest.raises(InvalidRequest, match="cancelled"):
            runner.cancel(record)
    assert ids(results(store, record)) == sorted(app.texts) == ["a", "b", "c"]
    assert record["cancelled_at"] is not None


async def test_cancel_while_a_request_waits_for_room(folder: Path) -> None:
    async def answer(text: str) -> tuple[int, dict[str, str]]:
        return 429, {}

    store, app = open_store(folder), App(answer)
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a"), CHAT, None)
        await until(lambda: len(app.texts) > 1)
        runner.cancel(record)
        assert await ended(record) == "cancelled"
    assert results(store, record, "error_file_id") == []


async def test_cancel_while_the_file_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file takes a while to check. A cancellation meanwhile must not be overwritten."""
    reached, released = threading.Event(), threading.Event()

    def slow_check(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
        reached.set()
        assert released.wait(PATIENCE)
        return check_lines(path, endpoint)

    monkeypatch.setattr(runner_module, "check_lines", slow_check)
    store, app = open_store(folder), App()
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a", "b"), CHAT, None)
        await until(reached.is_set)
        runner.cancel(record)
        released.set()
        assert await ended(record) == "cancelled"
    assert app.texts == []


async def test_batch_ends_when_its_time_is_over(folder: Path) -> None:
    store, app = open_store(folder), App()
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a"), CHAT, None)
        record["expires_at"] = 1
        assert await ended(record) == "expired"
    assert record["expired_at"] is not None


async def test_key_that_is_gone_fails_the_batch(folder: Path) -> None:
    """The answers until then stay."""
    store, app = open_store(folder), App()
    callers: list[Caller | None] = [Caller(), Caller(), None]
    async with runner_of(store, app, 1, lambda owner: callers.pop(0)) as runner:
        record = runner.create("gone", upload(store, "a", "b", "c"), CHAT, None)
        assert await ended(record) == "failed"
    assert [error["code"] for error in record["errors"]["data"]] == ["key_gone"]
    assert ids(results(store, record)) == ["a", "b"]


async def test_store_without_room_fails_the_batch(folder: Path) -> None:
    store, app = open_store(folder), App()
    async with runner_of(store, app, 1) as runner:
        file = upload(store, "a", "b", "c")
        store.capacity = store.used + 300
        record = runner.create("", file, CHAT, None)
        assert await ended(record) == "failed"
    assert [error["code"] for error in record["errors"]["data"]] == ["batch_store_full"]
    assert ids(results(store, record)) == ["a"]


async def test_defect_in_a_request_becomes_its_answer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    app, store = create_app(Script(ZeroDivisionError("secret"))), open_store(folder)
    runner = BatchRunner(app.call, store, lambda owner: Caller(), 1)
    path = store.new_upload()
    path.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": chat()}))
    file = store.add_file(path, "", filename="in.jsonl", purpose="batch")
    record = runner.create("", file, CHAT, None)
    await runner._run(record)
    assert record["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    failed = store.content_path(record["error_file_id"]).read_text()
    assert json.loads(failed)["response"]["status_code"] == 500
    assert "secret" not in failed
    assert "secret" in caplog.text


async def test_full_disk_fails_one_batch_and_the_runner_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while a batch is ended once stopped all batches until the server was started again."""

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        return 200, {}

    store = open_store(folder)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    async with runner_of(store, App(answer)) as runner:
        first = runner.create("", upload(store, "a"), CHAT, None)
        with monkeypatch.context() as broken:
            broken.setattr(store, "append", full)
            broken.setattr(store, "save_batch", full)
            assert await ended(first) == "failed"
        second = runner.create("", upload(store, "b"), CHAT, None)
        assert await ended(second) == "completed"


async def test_a_batch_names_no_file_that_a_full_disk_has_prevented(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk becomes full after the answer. Clients once got the id of a file that did not exist."""
    store = open_store(folder)
    save = store.save_batch

    def full(record: Record) -> None:
        if record["status"] not in ("validating", "in_progress"):
            raise Unavailable("files and batches cannot be written now")
        save(record)

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        return 200, {}

    monkeypatch.setattr(store, "save_batch", full)
    async with runner_of(store, App(answer)) as runner:
        batch = runner.create("", upload(store, "a"), CHAT, None)
        assert await ended(batch) == "failed"
        async with asyncio.timeout(10):
            while batch["output_file_id"] is not None:  # it was named before it was to be written
                await asyncio.sleep(0.01)
    assert batch["errors"] is not None
    assert list(store.lines_path(batch["id"], "out").parent.glob("*.out")), "the answers are still there"


async def test_batches_of_two_clients_run_beside_each_other(folder: Path) -> None:
    held = asyncio.Event()

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        if text == "long":
            await held.wait()
        return 200, {}

    store = open_store(folder)
    async with runner_of(store, App(answer)) as runner:
        first = runner.create("one", upload(store, "long"), CHAT, None)
        second = runner.create("two", upload(store, "a"), CHAT, None)
        assert await ended(second) == "completed"
        assert first["status"] == "in_progress"
        held.set()
        assert await ended(first) == "completed"


@pytest.mark.parametrize("cut", [b"", b'{"id": "batch_req_1", "custom_id": "n1', b'{"custom_id": "n9"}'])
@pytest.mark.parametrize("stop_after", [0, 1, 5, 7])
async def test_restart_answers_the_rest(folder: Path, cut: bytes, stop_after: int) -> None:
    """The server stops in the middle, and maybe while it writes a line. Nothing is lost, and nothing is there
    twice, although requests that were being answered are asked again."""
    names = [f"n{number}" for number in range(8)]
    held = asyncio.Event()

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        if len(app.texts) > stop_after:
            await held.wait()
        return (400 if text == "n3" else 200), {}

    store, app = open_store(folder), App(answer)
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, *names), CHAT, None)
        await until(lambda: app.running == min(2, 8 - stop_after) and record["status"] == "in_progress")
        await until(lambda: sum(record["request_counts"].values()) - 8 == stop_after)
    with store.lines_path(record["id"], "out").open("ab") as file:
        file.write(cut)

    again, new = open_store(folder), App(App()._well)
    reopened = again.batch(record["id"], "")
    before = set(app.texts[:stop_after])
    async with runner_of(again, new):
        assert await ended(reopened) == "completed"
    assert not before & set(new.texts)
    assert sorted(new.texts) == sorted(set(names) - before)
    both = results(again, reopened) + results(again, reopened, "error_file_id")
    assert ids(both) == names
    assert reopened["request_counts"]["total"] == 8
    assert reopened["request_counts"]["completed"] == len(results(again, reopened))


async def test_cancelled_batch_stays_cancelled_after_a_restart(folder: Path) -> None:
    async def answer(text: str) -> tuple[int, dict[str, str]]:
        await asyncio.Event().wait()
        raise AssertionError

    store, app = open_store(folder), App(answer)
    async with runner_of(store, app) as runner:
        record = runner.create("", upload(store, "a", "b", "c"), CHAT, None)
        await until(lambda: app.running == 2)
        runner.cancel(record)
    again, new = open_store(folder), App()
    reopened = again.batch(record["id"], "")
    async with runner_of(again, new):
        assert await ended(reopened) == "cancelled"
    assert new.texts == []


@pytest.mark.parametrize("kind", ["output_file_id", "error_file_id"])
async def test_crash_while_the_results_become_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The lines are a file already, and the batch does not name it yet. After the restart, it must."""

    class Crash(BaseException):
        """The process ends here."""

    async def answer(text: str) -> tuple[int, dict[str, str]]:
        return (400 if text == "bad" else 200), {}

    store = open_store(folder)
    saved = store.save_batch

    def save(record: Record) -> None:
        if record[kind] is not None:
            raise Crash
        saved(record)

    monkeypatch.setattr(store, "save_batch", save)
    runner = BatchRunner(App(answer).call, store, lambda owner: Caller(), 1)
    record = runner.create("", upload(store, "a", "bad"), CHAT, None)
    with pytest.raises(Crash):
        await runner._run(record)

    again = open_store(folder)
    reopened = again.batch(record["id"], "")
    async with runner_of(again, App(answer)):
        assert await ended(reopened) == "completed"
    assert ids(results(again, reopened)) == ["a"]
    assert ids(results(again, reopened, "error_file_id")) == ["bad"]


async def test_call_from_within() -> None:
    """It is refused as any other request is, and has the id that it was given."""
    body = json.dumps(chat()).encode()
    full = create_app(Script(Overloaded("full", retry_after=2.5)))
    reply = await full.call(CHAT, body, Caller(), "mine")
    assert (reply.status, reply.retry_after, reply.request_id) == (429, 3.0, "mine")
    reply = await create_app(Script(LAST)).call(CHAT, body, Caller(), "mine")
    assert (reply.status, reply.retry_after, reply.prompt_tokens) == (200, None, LAST.usage.prompt)


def test_pages_of_a_list() -> None:
    records: list[Record] = [{"id": str(number)} for number in range(5)]
    first = batch_list(records, 2, None)
    assert (first["data"], first["has_more"]) == (records[:2], True)
    assert (first["first_id"], first["last_id"]) == ("0", "1")
    last = batch_list(records, 4, first["last_id"])
    assert (last["data"], last["has_more"]) == (records[2:], False)
    empty = batch_list([], 2, None)
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)
