"""Bodies as the application receives them: in pieces, from clients that stop, and too many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fovea.core.types import Delta, GenerationRequest, StageTimings, Usage
from fovea.http.bodies import FREE
from fovea.server.app import App, create_app
from fovea.server.settings import ServerSettings
from tests.server.scripted import Script
from tests.server.support import chat, data_url, image, picture, user

CHAT = "/v1/chat/completions"
MIB = 1024 * 1024
LAST = Delta(0, "so", (1,), finish_reason="length", usage=Usage(1, 1), timings=StageTimings())
JSON = {"content-type": "application/json"}


class Upload:
    """One request to an application, whose body a test sends piece by piece.

    status, answer: the response, once it is there.
    reads: number of times that the application asked for bytes.
    """

    def __init__(self, app: App, headers: dict[str, str] = JSON, path: str = CHAT) -> None:
        self.status = 0
        self.answer = b""
        self.reads = 0
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("127.0.0.1", 5),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def send(self, data: bytes, more: bool = True) -> None:
        """Send bytes, and let the application run until it waits."""
        self._pieces.put_nowait({"type": "http.request", "body": data, "more_body": more})
        for _ in range(50):
            await asyncio.sleep(0)

    def leave(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.answer)["error"]
        return error

    async def _receive(self) -> dict[str, Any]:
        self.reads += 1
        return await self._pieces.get()

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.answer += message.get("body", b"")


def app_of(script: Script | None = None, **settings: Any) -> App:
    return create_app(script or Script(LAST, LAST, LAST), ServerSettings.of(**settings))


async def test_a_body_in_pieces_of_any_size() -> None:
    body = json.dumps(chat(user("é" * 300, "x"))).encode()
    upload = Upload(app_of())
    for at in range(len(body)):
        upload._pieces.put_nowait({"type": "http.request", "body": body[at : at + 1], "more_body": True})
    await upload.send(b"", more=False)
    await upload.task
    assert upload.status == 200, upload.answer


async def test_a_number_of_6000_digits_in_small_segments(caplog: pytest.LogCaptureFixture) -> None:
    """Attack: a seed of 6,000 digits, 500 in a segment. It gave 500 and two tracebacks in the log."""
    upload = Upload(app_of())
    for piece in (b'{"messages":[{"role":"user","content":"a"}],"seed":', *[b"1" * 500] * 12):
        upload._pieces.put_nowait({"type": "http.request", "body": piece, "more_body": True})
    await upload.send(b"}", more=False)
    await upload.task
    assert (upload.status, upload.error["code"]) == (400, "invalid_json")
    assert "too many digits" in upload.error["message"]
    assert caplog.messages == []


async def test_a_number_that_python_does_not_convert(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever lets a number through to Python's parser, its refusal is the client's error, not a defect."""
    monkeypatch.setattr("fovea.api.cutter.MAX_DIGITS", 1_000_000)
    upload = Upload(app_of())
    await upload.send(b'{"messages":[],"seed":' + b"1" * 6000 + b"}", more=False)
    await upload.task
    assert (upload.status, upload.error["code"]) == (400, "invalid_json")
    assert upload.error["message"] == "the body holds a number that cannot be read"
    assert caplog.messages == []


async def test_a_length_in_odd_digits_is_no_defect() -> None:
    """Python takes a superscript two for a digit, but converts it to no number."""
    upload = Upload(app_of(), {**JSON, "content-length": "²"})
    await upload.send(json.dumps(chat()).encode(), more=False)
    await upload.task
    assert upload.status == 200, upload.answer


async def test_unfinished_bodies_give_way_to_a_new_one() -> None:
    """Attack: clients send nearly all of a large body and then keep the connection open.

    Their bytes stayed in memory without a limit. Now the largest one is refused, and a later body passes.
    """
    app = app_of(max_body_mib=1, max_bodies_mib=1)
    budget = app.state.bodies
    slow = [Upload(app) for _ in range(2)]
    for upload in slow:
        await upload.send(b'{"messages": "' + b"x" * (540 * 1024))
    assert MIB > budget.held > 900 * 1024
    late = Upload(app)
    await late.send(json.dumps(chat(user("x" * (MIB // 4)))).encode(), more=False)
    await late.task
    assert late.status == 200, late.answer
    refused = [upload for upload in slow if upload.task.done()]
    assert len(refused) == 1
    for upload in refused:
        assert (upload.status, upload.error["code"]) == (429, "bodies_full")
    for upload in slow:
        upload.leave()
        await upload.task
    assert budget.held == 0
    assert budget.refused == len(refused)


async def test_bytes_are_given_back_when_the_image_was_read() -> None:
    """A request holds its images' bytes until they are read, and not until its answer ends."""

    class Waiting(Script):
        held: list[float]

        async def stream(self, request: GenerationRequest):  # type: ignore[no-untyped-def, override]
            self.held = [app.state.bodies.held]
            yield LAST

    script = Waiting()
    app = app_of(script)
    body = json.dumps(chat(user(image(data_url(picture(256, 256))), "x" * FREE))).encode()
    assert len(body) > 3 * FREE
    upload = Upload(app)
    await upload.send(body[: 2 * FREE])
    assert app.state.bodies.held == FREE
    await upload.send(body[2 * FREE :], more=False)
    await upload.task
    assert upload.status == 200, upload.answer
    assert script.held[0] < len(body) / 2
    assert app.state.bodies.held == 0


async def test_a_client_that_leaves_gives_everything_back() -> None:
    app = app_of()
    upload = Upload(app)
    await upload.send(b'{"messages": "' + b"x" * MIB)
    assert app.state.bodies.held > 0
    upload.leave()
    await upload.task
    assert (upload.status, app.state.bodies.held) == (0, 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/images", "/tokenize"])
async def test_bodies_without_a_key_are_never_read(path: str) -> None:
    """Attack: bodies of clients without a key would fill the memory before the key is checked."""
    upload = Upload(app_of(api_keys=("secret",)), path=path)
    await upload.task
    assert (upload.status, upload.reads) == (401, 0)


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({**JSON, "content-encoding": "gzip"}, 415, "Content-Encoding 'gzip'; accepted: bodies that are not"),
        ({**JSON, "content-encoding": "identity, br"}, 415, "Content-Encoding"),
        ({"content-type": "multipart/form-data; boundary=x"}, 400, "Content-Type: application/json"),
        ({}, 400, "Content-Type: application/json"),
        ({**JSON, "content-length": str(65 * MIB)}, 413, f"accepted: at most {64 * MIB} bytes"),
    ],
)
async def test_a_body_is_refused_by_its_headers_before_it_is_read(
    headers: dict[str, str], status: int, says: str
) -> None:
    """A compressed body could be a thousand times as large as what arrives; none is ever decompressed."""
    upload = Upload(app_of(), headers)
    await upload.task
    assert (upload.status, upload.reads) == (status, 0)
    assert says in upload.error["message"]


async def test_a_hostile_body_is_refused_without_reading_on() -> None:
    upload = Upload(app_of())
    await upload.send(b'{"messages": ' + b"[" * 1000)
    assert upload.task.done()
    assert (upload.status, upload.error["code"]) == (400, "invalid_json")


async def test_a_body_over_the_limit_that_does_not_announce_it() -> None:
    upload = Upload(app_of(max_body_mib=1))
    for _ in range(17):
        await upload.send(b" " * 65536)
    assert upload.status == 413


@pytest.mark.parametrize("large", [False, True])
async def test_uploads_count_their_values(large: bool) -> None:
    """Attack: /v1/images did not count the values of a body; 11 MiB of them stopped all clients for 15 s."""
    body = {"url": "x", "detail": [[]] * 40_000, "model": "y" * 100_000 * large}
    upload = Upload(app_of(), path="/v1/images")
    await upload.send(json.dumps(body).encode(), more=False)
    await upload.task
    assert upload.status == 400
    assert "too many values" in upload.error["message"]


async def test_errors_about_long_paths_are_short() -> None:
    """Attack: a hundred nested objects with long keys came back whole, as path and as message."""
    body: Any = 1
    for at in range(90):
        body = {f"{at}" + "k" * 60: body}
    upload = Upload(app_of(strict_requests=True))
    await upload.send(
        json.dumps({"messages": [{"role": "user", "content": "x", **body}]}).encode(), more=False
    )
    await upload.task
    assert upload.status == 400
    assert len(upload.error["message"]) <= 500
    assert len(upload.error["param"]) <= 200


@pytest.mark.parametrize("slash", ["/", "\\/"])
async def test_images_of_php_clients(slash: str) -> None:
    """PHP's json_encode writes every slash with a backslash, in a megabyte of base64 as well."""
    body = json.dumps(chat(user(image(data_url(picture(300, 300))), "x"))).replace("/", slash).encode()
    upload = Upload(app_of())
    await upload.send(body, more=False)
    await upload.task
    assert upload.status == 200, upload.answer
