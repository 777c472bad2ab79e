"""/v1/files and /v1/batches of a running server: uploads, limits, owners, results and restarts."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvloop

from fovea import Engine
from fovea.core.errors import Overloaded
from fovea.core.types import Delta, GenerationRequest, StageTimings, TextPart, Usage
from fovea.server import batch_runner as runner_module
from fovea.server.app import create_app
from fovea.server.run import serving
from fovea.server.settings import BatchSettings, ServerSettings
from tests.server.scripted import Script
from tests.server.support import PATIENCE, Json, Server, chat, data_url, image, picture, running, until, user

CHAT = "/v1/chat/completions"
MIB = 1 << 20


def settings_of(folder: Path, *keys: str, **batches: Any) -> ServerSettings:
    return ServerSettings(api_keys=keys, batches=BatchSettings(batch_dir=folder / "kept", **batches))


@pytest.fixture(scope="module")
def server(engine: Engine, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(engine, settings_of(tmp_path_factory.mktemp("batches")), files) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def lines(*bodies: Json, url: str = CHAT) -> bytes:
    """A file with a request for every body; their names are their numbers."""
    values = [
        {"custom_id": f"n{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, values)).encode()


def upload(client: httpx.Client, content: bytes, purpose: str = "batch", **options: Any) -> httpx.Response:
    file = ("in.jsonl", content, "application/jsonl")
    return client.post("/v1/files", files={"file": file}, data={"purpose": purpose}, **options)


def start(client: httpx.Client, content: bytes, endpoint: str = CHAT) -> str:
    """Begin a batch, and return its id."""
    name = upload(client, content).json()["id"]
    answer = client.post("/v1/batches", json={"input_file_id": name, "endpoint": endpoint})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ended(client: httpx.Client, name: str) -> Json:
    """Wait for the end of a batch, and return it."""
    batch: Json = {}

    def has_ended() -> bool:
        batch.update(client.get(f"/v1/batches/{name}").json())
        return batch["status"] in ("completed", "failed", "cancelled", "expired")

    until(has_ended)
    return batch


def content(client: httpx.Client, name: str | None) -> list[Json]:
    return [] if name is None else [
        json.loads(line) for line in client.get(f"/v1/files/{name}/content").text.splitlines()
    ]  # fmt: skip


def test_file_is_stored_listed_and_deleted(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", io.BytesIO(b"some bytes")), purpose="batch")
    other = client.files.create(file=("doc.txt", io.BytesIO(b"text")), purpose="user_data")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "in.jsonl", 10, "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == b"some bytes"
    assert client.files.list(purpose="batch").data[0].id == file.id, "the newest of this second comes first"
    assert {file.id, other.id} <= {entry.id for entry in client.files.list().data}
    assert client.files.delete(file.id).deleted
    for read in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            read(file.id)
        assert caught.value.code == "file_not_found"


def test_pages_of_files(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=io.BytesIO(b"x"), purpose="batch").id for _ in range(3)]
    assert set(ids) <= {
        entry.id for entry in client.files.list(limit=1)
    }  # the client asks for page after page


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fun"}}, "purpose"),
        ({"data": {"purpose": "batch", "file": "text"}}, "file"),
        ({"files": [("file", ("a", b"x")), ("file", ("b", b"x"))], "data": {"purpose": "batch"}}, None),
        ({"json": {"purpose": "batch"}}, None),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, None),
    ],
    ids=["no file", "no purpose", "purpose", "field", "two files", "json", "no boundary"],
)
def test_wrong_uploads_are_refused(server: Server, form: Any, param: str | None) -> None:
    with server.client() as client:
        answer = client.post("/v1/files", **form)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_name_of_a_file_is_no_path(server: Server) -> None:
    with server.client() as client:
        form: Any = {"files": {"file": ("../../etc/passwd", b"x")}, "data": {"purpose": "batch"}}
        answer = client.post("/v1/files", **form)
    assert answer.json()["filename"] == "passwd"


def without_length(client: httpx.Client, content: bytes) -> httpx.Response:
    """Upload a file in pieces, without the header that tells its length."""
    request = client.build_request("POST", "/v1/files", data={"purpose": "batch"}, files={"file": content})
    body = request.read()
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    return client.post("/v1/files", content=pieces, headers={"content-type": request.headers["content-type"]})


def test_size_of_a_file_is_limited(engine: Engine, files: Path, tmp_path: Path) -> None:
    """Refused by the length in the header, or while it arrives."""
    settings = settings_of(tmp_path, batch_file_mib=1)
    with running(engine, settings, files) as server, server.client() as client:
        assert upload(client, b"x" * MIB).status_code == 200
        for answer in (upload(client, b"x" * 2 * MIB), without_length(client, b"x" * 3 * MIB)):
            assert answer.status_code == 413
            assert answer.json()["error"]["param"] == "file"
            assert "batch_file_mib" in answer.json()["error"]["message"]
        assert len(client.get("/v1/files").json()["data"]) == 1
    assert not list((tmp_path / "kept").rglob("*.part"))


def test_largest_file_is_exact(engine: Engine, files: Path, tmp_path: Path) -> None:
    """The form around a file may have some bytes more, the file may not."""
    settings = settings_of(tmp_path, batch_file_mib=1)
    with running(engine, settings, files) as server, server.client() as client:
        assert upload(client, b"x" * MIB).status_code == 200
        assert upload(client, b"x" * (MIB + 1)).status_code == 413


def test_small_file_without_a_length_needs_only_its_own_room(
    engine: Engine, files: Path, tmp_path: Path
) -> None:
    """Counted by the largest file that may come, it would never fit into a store that is smaller."""
    settings = settings_of(tmp_path, batch_store_mib=1, batch_file_mib=2)
    with running(engine, settings, files) as server, server.client() as client:
        answer = without_length(client, b"x")
    assert answer.status_code == 200, answer.text


def test_ceiling_of_all_files(engine: Engine, files: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, batch_store_mib=1)
    with running(engine, settings, files) as server, server.client() as client:
        first = upload(client, b"x" * 700_000).json()["id"]
        full = upload(client, b"x" * 700_000)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "batch_store_full")
        assert client.delete(f"/v1/files/{first}").json()["deleted"]
        assert upload(client, b"x" * 700_000).status_code == 200


async def test_uploads_at_the_same_time_keep_below_the_ceiling(tmp_path: Path) -> None:
    """Each has room while the others are still copied."""
    app = create_app(Script(), settings_of(tmp_path, batch_store_mib=5))
    form: Any = {"files": {"file": ("a", b"x" * 3 * MIB)}, "data": {"purpose": "batch"}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answers = await asyncio.gather(*[client.post("/v1/files", **form) for _ in range(4)])
    assert sorted(answer.status_code for answer in answers) == [200, 413, 413, 413]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.data")) <= 5 * MIB


def test_without_a_folder_there_are_no_batches(engine: Engine, files: Path) -> None:
    with running(engine, ServerSettings(), files) as server, server.client() as client:
        wish = {"input_file_id": "file-1", "endpoint": CHAT}
        answers = [
            upload(client, b"x"),
            client.get("/v1/files"),
            client.get("/v1/files/file-1/content"),
            client.post("/v1/batches", json=wish),
            client.get("/v1/batches"),
            client.post("/v1/batches/batch_1/cancel"),
        ]
    assert [answer.status_code for answer in answers] == [404] * 6
    assert {answer.json()["error"]["code"] for answer in answers} == {"batches_off"}
    assert "--batch-dir" in answers[0].json()["error"]["message"]


def test_batch_of_the_public_client(client: openai.OpenAI) -> None:
    """Answers and failures are apart, and every request is in one of the two files, once."""
    question = user(image(data_url(picture())), "what?")
    content = lines(chat(), chat(question), chat(temperature=9), chat(), {"messages": 7})
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"run": "7"}
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "7"})
    until(lambda: client.batches.retrieve(batch.id).status == "completed")
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
    assert batch.output_file_id
    assert batch.error_file_id
    out, failed = (
        {entry["custom_id"]: entry["response"] for entry in map(json.loads, read.text.splitlines())}
        for read in (client.files.content(batch.output_file_id), client.files.content(batch.error_file_id))
    )
    assert (out.keys(), failed.keys()) == ({"n0", "n1", "n3"}, {"n2", "n4"})
    assert out["n0"]["body"]["choices"] == out["n3"]["body"]["choices"]
    assert out["n1"]["body"]["usage"]["prompt_tokens_details"]["image_tokens"] == 6
    assert all(answer["request_id"] for answer in out.values())
    assert failed["n2"]["status_code"] == 400
    assert failed["n2"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [entry.id for entry in client.batches.list(limit=2)]
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "the", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "the", "max_output_tokens": 2}, "response"),
        ("/v1/messages", {"messages": chat()["messages"], "max_tokens": 2}, None),
    ],
)  # fmt: skip
def test_other_endpoints(server: Server, endpoint: str, body: Json, kind: str | None) -> None:
    with server.client() as client:
        batch = ended(client, start(client, lines(body, url=endpoint), endpoint))
        [entry] = content(client, batch["output_file_id"])
    assert entry["response"]["status_code"] == 200
    assert entry["response"]["body"].get("object") == kind


def test_wrong_file_fails_with_the_numbers_of_its_lines(server: Server) -> None:
    good, wrong = lines(chat()), lines(chat(stream=True)).replace(b"n0", b"n1")
    with server.client() as client:
        batch = ended(client, start(client, b"\n".join((good, wrong, b"no JSON", good))))
    assert batch["status"] == "failed"
    errors = batch["errors"]["data"]
    assert [(error["line"], error["param"]) for error in errors] == [
        (2, "body.stream"),
        (3, None),
        (4, "custom_id"),
    ]
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-unknown"}, 404, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": "/admin/cache/clear"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
    ],
    ids=str,
)
def test_wrong_batches_are_refused(server: Server, change: Json, status: int, param: str) -> None:
    with server.client() as client:
        name = upload(client, lines(chat())).json()["id"]
        answer = client.post("/v1/batches", json={"input_file_id": name, "endpoint": CHAT, **change})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/files"])
def test_wrong_page_names_the_parameter(server: Server, path: str) -> None:
    answer = server.get(path, params={"limit": "many"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


def test_unknown_batches(server: Server) -> None:
    with server.client() as client:
        answers = [client.get("/v1/batches/batch_1"), client.post("/v1/batches/batch_1/cancel")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json()["error"]["code"] == "batch_not_found"


class SlowEngine(Script):
    """An engine that answers with the user's own text, some requests at once and the others when released.

    asked: texts of all requests, in the order of their arrival.
    free: number of requests that are answered at once.
    released: set, from the test's thread: the others are answered, too.
    full: number of requests that find the queue full before the first is accepted.
    """

    def __init__(self, free: int = 1000, full: int = 0) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.free, self.full = free, full
        self.released = threading.Event()

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        [part] = request.prompt.messages[-1].parts  # type: ignore[union-attr]
        assert isinstance(part, TextPart)
        self.asked.append(part.text)
        number = len(self.asked)
        while number > self.free and not self.released.is_set():
            await asyncio.sleep(0.005)
        yield Delta(0, part.text, (1,), finish_reason="stop", usage=Usage(1, 1), timings=StageTimings())

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self.full:
            self.full -= 1
            raise Overloaded("the queue is full", retry_after=1.0)


@contextmanager
def served(engine: Script, settings: ServerSettings, **headers: str) -> Iterator[httpx.Client]:
    with (
        serving(create_app(engine, settings), uvloop.new_event_loop) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as client,
    ):
        yield client


def questions(count: int) -> bytes:
    return lines(*[{"messages": [{"role": "user", "content": f"n{number}"}]} for number in range(count)])


def answers_of(client: httpx.Client, batch: Json) -> list[tuple[str, str]]:
    """The name and the text of every answer, after a check that each answers its own request."""
    entries = content(client, batch["output_file_id"])
    pairs = [
        (entry["custom_id"], entry["response"]["body"]["choices"][0]["message"]["content"])
        for entry in entries
    ]
    assert all(name == text for name, text in pairs)
    return sorted(pairs)


@pytest.mark.parametrize(
    "cut", [b"", b'{"id": "batch_req_1", "custom_id": "n7", "resp'], ids=["clean", "cut line"]
)
def test_restart_goes_on_where_the_server_stopped(tmp_path: Path, cut: bytes) -> None:
    settings = settings_of(tmp_path, batch_parallel=3)
    first = SlowEngine(free=4)
    with served(first, settings) as client:
        name = start(client, questions(10))
        until(lambda: client.get(f"/v1/batches/{name}").json()["request_counts"]["completed"] == 4)
    [path] = (tmp_path / "kept" / "batches").glob("*.out")
    with path.open("ab") as file:
        file.write(cut)

    second = SlowEngine()
    with served(second, settings) as client:
        batch = ended(client, name)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        assert answers_of(client, batch) == [(f"n{number}", f"n{number}") for number in range(10)]
    assert sorted(second.asked) == [f"n{number}" for number in range(4, 10)]

    third = SlowEngine()
    with served(third, settings) as client:
        assert client.get(f"/v1/batches/{name}").json() == batch
    assert third.asked == []


def test_full_queue_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    engine = SlowEngine(full=3)
    with served(engine, settings_of(tmp_path)) as client:
        batch = ended(client, start(client, questions(5)))
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert len(answers_of(client, batch)) == 5
    assert engine.full == 0


def test_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    engine = SlowEngine(free=2)
    with served(engine, settings_of(tmp_path, batch_parallel=2)) as client:
        name = start(client, questions(10))
        until(lambda: len(engine.asked) == 4)
        assert client.post(f"/v1/batches/{name}/cancel").json()["status"] == "cancelling"
        engine.released.set()
        batch = ended(client, name)
        assert batch["status"] == "cancelled"
        assert len(answers_of(client, batch)) == len(engine.asked) == 4
        again = client.post(f"/v1/batches/{name}/cancel")
        assert again.status_code == 400


def test_file_of_a_running_batch_stays(tmp_path: Path) -> None:
    engine = SlowEngine(free=0)
    with served(engine, settings_of(tmp_path)) as client:
        batch = client.get(f"/v1/batches/{start(client, questions(1))}").json()
        answer = client.delete(f"/v1/files/{batch['input_file_id']}")
        assert answer.status_code == 400
        assert batch["id"] in answer.json()["error"]["message"]
        engine.released.set()
        ended(client, batch["id"])
        assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200


def test_another_key_sees_nothing(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "one", "two")
    with served(SlowEngine(), settings, authorization="Bearer one") as client:
        batch = ended(client, start(client, questions(2)))
        assert batch["status"] == "completed"
        assert "owner" not in batch
        other = {"authorization": "Bearer two"}
        for path in (
            f"/v1/batches/{batch['id']}",
            f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
        ):
            assert client.get(path).status_code == 200
            assert client.get(path, headers=other).status_code == 404
        for path in ("/v1/batches", "/v1/files"):
            assert client.get(path, headers=other).json()["data"] == []
        wish = {"input_file_id": batch["input_file_id"], "endpoint": CHAT}
        assert client.post("/v1/batches", json=wish, headers=other).status_code == 404
        assert client.post(f"/v1/batches/{batch['id']}/cancel", headers=other).status_code == 404
        assert client.delete(f"/v1/files/{batch['input_file_id']}", headers=other).status_code == 404
        for path in ("/v1/batches", "/v1/files"):
            assert client.get(path, headers={"authorization": "Bearer three"}).status_code == 401


def test_batch_of_a_key_that_is_gone_fails(tmp_path: Path) -> None:
    """The second key has the first one's place, and must not inherit its files either."""
    engine = SlowEngine(free=1)
    with served(engine, settings_of(tmp_path, "one", "two"), authorization="Bearer two") as client:
        name = start(client, questions(10))
        until(lambda: client.get(f"/v1/batches/{name}").json()["request_counts"]["completed"] == 1)
    new = SlowEngine()
    with served(new, settings_of(tmp_path, "one"), authorization="Bearer one") as client:
        path = tmp_path / "kept" / "batches" / f"{name}.json"
        until(lambda: json.loads(path.read_text())["status"] == "failed")
        assert client.get(f"/v1/batches/{name}").status_code == 404
    assert json.loads(path.read_text())["errors"]["data"][0]["code"] == "key_gone"
    assert new.asked == []


def test_keys_in_another_order_keep_their_files(tmp_path: Path) -> None:
    """Owners are named by their key and not by its place among --api-key, which a new key would shift."""
    with served(SlowEngine(), settings_of(tmp_path, "one"), authorization="Bearer one") as client:
        name = upload(client, b"secret of one").json()["id"]
    settings = settings_of(tmp_path, "new", "one")
    with served(SlowEngine(), settings, authorization="Bearer new") as client:
        assert client.get(f"/v1/files/{name}").status_code == 404
        own = client.get(f"/v1/files/{name}", headers={"authorization": "Bearer one"})
        assert own.status_code == 200
