"""Hostile clients: what reaches a backend is what was checked, and nobody gets more than its share."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fovea.api.cutter import Cutter
from fovea.core.errors import InvalidRequest
from fovea.gateway.cache.key import MEDIA_MARK, cacheability
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import REFUSED, check_fields, check_pictures, media_parts
from fovea.gateway.settings import TimeoutSettings
from fovea.gateway.translate.translation import to_chat
from tests.gateway.hostile import (
    CHAT,
    EVENT,
    RawBackend,
    Write,
    chunk,
    keys_file,
    running,
    soon,
    stream_head,
)

INNER = "http://169.254.169.254/latest/meta-data"


def png(shade: int = 0) -> str:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def parse(data: bytes) -> Body:
    cutter = Cutter()
    cutter.feed(data)
    return Body.parse(cutter)


def demand(api: str = "chat", **value: Any) -> Demand:
    """The demand of a request that passes the checks of its fields."""
    body = parse(json.dumps({"model": "m", **value}).encode())
    check_fields(body.value, api)
    return Demand(body, [])


@pytest.mark.parametrize(
    "data",
    [
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": -Infinity}',
        b'{"temperature": 1e400}', b'{"temperature": -1e999}', b'{"seed": ' + b"9" * 600 + b"}",
        b'{"a": "\xff"}', '{"model": "m"}'.encode("utf-16"), '{"model": "m"}'.encode("utf-16-le"),
        '{"model": "m"}'.encode("utf-32"),
        b"[" * 101 + b"]" * 101, b'{"a": [' + b"1," * 200_001 + b"1]}", b"[]", b'"a"', b"", b'{"a": 1} {}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(data)


@pytest.mark.parametrize("sign", ["\u2200", "\u225b", "\u227b"])
def test_limits_of_nesting_hold_for_every_encoding(sign: str) -> None:
    """In UTF-16 these characters have the bytes of a quote and of brackets, which could hide the limits."""
    text = f'{{"{sign}": ' + "[" * 5000 + "]" * 5000 + "}"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        with pytest.raises(InvalidRequest):
            parse(text.encode(encoding))


def test_a_backend_reads_what_was_checked() -> None:
    long = "x" * 300
    text = rb'{"model":"a","mod\u0065l":"b","max_tokens":1,"max_tokens":2,"messages":[{"content":"%b"}]}'
    body = parse(text % long.encode())
    written = json.loads(body.encoded())
    assert written == {"model": "b", "max_tokens": 2, "messages": [{"content": long}]}
    assert body.encoded().count(b"model") == body.encoded().count(b"max_tokens") == 1
    assert parse(b"\xef\xbb\xbf" + body.encoded()).encoded() == body.encoded()


def test_nobody_can_send_a_placeholder() -> None:
    """The number in placeholders is new for every body, so that texts that look like one stay texts."""
    seen = parse(json.dumps({"a": "x" * 300}).encode()).value["a"]
    forged = [seen, f"data:image/png;base64,{seen}", "0" * 32 + ":0", f'"{seen}"', "y" * 300]
    body = parse(json.dumps({"a": forged, seen: 1, "z" * 400: 2}).encode())
    assert json.loads(body.encoded()) == {"a": forged, seen: 1, "z" * 400: 2}


HIDDEN = {
    "message": {"role": "user", "image_url": png(), "content": [{"image_url": {"url": INNER}}]},
    "both": {"content": [{"type": "video_url", "image_url": {"url": png()}, "video_url": {"url": INNER}}]},
    "source": {"content": [{"type": "image_url", "source": {"data": "AAAA"}, "image_url": {"url": INNER}}]},
    "source url": {"content": [{"type": "image", "source": {"data": "AAAA", "url": INNER}}]},
    "object": {"content": {"type": "image_url", "image_url": {"url": INNER}}},
    "lists": {"content": [[[{"type": "image_url", "image_url": {"url": INNER}}]]]},
    "tool result": {"content": [{"type": "tool_result", "content": [{"image_url": INNER}]}]},
    "screenshot": {"type": "computer_call_output", "output": {"image_url": INNER}},
    "deep": {"a": {"b": [{"c": {"d": [{"e": {"f": [{"g": {"h": [{"i": {"image_url": INNER}}]}}]}}]}}]}},
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("field", ["messages", "input"])
def test_urls_are_found_wherever_an_engine_may_read_them(name: str, field: str) -> None:
    assert INNER in [part.url for part in media_parts({field: [HIDDEN[name]]})]


UNCHECKED: list[dict[str, Any]] = [
    {"type": "audio_url", "audio_url": {"url": INNER}}, {"audio_url": INNER},
    {"type": "image_embeds", "image_embeds": "AAAA"}, {"type": "image_pil", "image_pil": "x"},
    {"type": "input_file", "file_url": INNER},
    {"type": "image", "url": INNER}, {"type": "image", "image": INNER},
    {"type": "video", "path": "/etc/passwd"}, {"type": "image_url", "image_url": None, "uuid": "of-another"},
    {"type": "image_url", "uuid": "of-another"}, {"type": "image_url", "image_url": {"url": [INNER]}},
    {"type": "text", "text": "a", "multi_modal_data": {"image": INNER}},
]  # fmt: skip


@pytest.mark.parametrize("part", UNCHECKED, ids=lambda part: "+".join(part))
def test_media_that_cannot_be_checked_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        list(media_parts({"messages": [{"role": "tool", "content": [part]}]}))
    assert INNER not in error.value.message


def test_arguments_of_calls_are_no_media() -> None:
    call = {"type": "tool_use", "name": "show", "input": {"image_url": "a.png", "audio_url": 1}}
    assert not list(media_parts({"messages": [{"role": "assistant", "content": [call]}]}))


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_reach_into_engines_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_fields({name: {"a": 1}}, "chat")
    assert error.value.param == name
    check_fields({name: None}, "chat")


@pytest.mark.parametrize(
    ("api", "value"),
    [
        ("chat", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("chat", {"chat_template_kwargs": {"tokenize": True}}), ("chat", {"stream": "true"}),
        ("chat", {"stream": 1}), ("chat", {"n": "5"}), ("chat", {"n": 5.0}), ("chat", {"n": 0}),
        ("chat", {"n": -1}), ("chat", {"n": True}), ("chat", {"n": 100_000}), ("chat", {"best_of": 10**9}),
        ("chat", {"max_tokens": -2}), ("chat", {"max_tokens": 1e5}), ("chat", {"max_tokens": "9"}),
        ("chat", {"n_predict": -1}), ("chat", {"max_completion_tokens": 1 << 40}),
        ("chat", {"n": 1024, "max_tokens": (1 << 31) - 1}),
        ("completions", {"prompt": {"prompt_string": "a", "multimodal_data": ["AAAA"]}}),
        ("completions", {"prompt": [{"prompt_string": "a"}], "messages": []}),
    ],
)  # fmt: skip
def test_work_that_is_not_counted_is_refused(api: str, value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        demand(api, **value)


def test_demand_counts_all_work() -> None:
    assert demand(max_tokens=10, n=3).answer_tokens == 30
    assert demand("completions", prompt="a", max_tokens=10, best_of=4, n=2).answer_tokens == 40
    assert demand("completions", prompt=["a"] * 100, max_tokens=10).answer_tokens == 1000
    assert demand("completions", prompt=[[1, 2]] * 100, max_tokens=10).answer_tokens == 1000
    assert demand(max_completion_tokens=1, max_tokens=1000).answer_tokens == 1000
    assert demand("completions", prompt=[7] * 5000).prompt_tokens >= 5000
    assert demand("completions", prompt=[[7] * 5000]).prompt_tokens >= 5000
    names = {f"{number:0200d}": {} for number in range(100)}
    assert demand(tools=[{"function": {"parameters": {"properties": names}}}]).prompt_tokens >= 5000
    assert demand(messages=[{"content": "\u4e2d" * 80}]).prompt_tokens >= 60


def test_an_image_does_not_hide_text() -> None:
    """Neither the object that holds a URL, nor texts that equal one, are left out of the count."""
    text = "\u00e9" * 4000
    url = "https://example.com/" + "a" * 200
    for message in (
        {"image_url": url, "content": text},
        {"content": [{"image_url": {"url": url, "x": text}}]},
        {"content": [{"image_url": url}, *({"type": "text", "text": url} for _ in range(50))]},
    ):
        body = parse(json.dumps({"model": "m", "messages": [message]}).encode())
        parts = list(media_parts(body.value))
        images = [_Held(part) for part in parts]
        assert Demand(body, images).prompt_tokens > 2000  # type: ignore[arg-type]


class _Held:
    """Replaces a RequestImage; Demand reads only its `part`."""

    key = "url:0"

    def __init__(self, part: Any) -> None:
        self.part = part


def test_the_name_of_a_session_is_bounded() -> None:
    body = parse(b'{"model": "m"}')
    assert len(Demand(body, [], "s" * 60_000).session) < 100
    assert Demand(body, [], "a" * 300).session != Demand(body, [], "b" * 300).session


URLS = [
    INNER, "http://127.0.0.1/a", "http://0x7f.1/a", "http://2130706433/a", "http://017700000001/a", "http://127.1/a",
    "http://[::1]/a", "http://[::ffff:127.0.0.1]/a", "http://[64:ff9b::7f00:1]/a", "http://localhost/a",
    "http://localhost./a", "http://\uff11\uff12\uff17.0.0.1/a", "http://user@example.com/a",
    "http://example.com@127.0.0.1/a",
    "http://127.0.0.1:22/a", "http://127.0.0.1\\@example.com/a", "http://example.com#@127.0.0.1/a\n",
    "//127.0.0.1/a",
    "file:///etc/passwd", "FILE:///etc/passwd", "gopher://127.0.0.1/a", "fovea-image://abc", "fovea:0",
    "  http://127.0.0.1/a",
    "\u3000http://127.0.0.1/a", "ht\ntp://127.0.0.1/a", "http:///a", "http://[fe80::1%25eth0]/a",
    "iVBORw0KGgo=", "",
]  # fmt: skip


async def test_urls_of_private_addresses_reach_no_backend() -> None:
    async with RawBackend().listening() as backend, running(backend) as gateway:
        for url in URLS:
            for kind in ("image_url", "video_url"):
                part = {"type": kind, kind: {"url": url}}
                got = await gateway.ask(messages=[{"role": "user", "content": [part]}])
                assert 400 <= got.status_code < 500, (url, got.text)
        assert not backend.received


async def test_a_name_for_an_image_belongs_to_its_tenant(tmp_path: Path) -> None:
    """vLLM keeps images by `uuid`: without a name of its own, a tenant could replace another's image."""
    keys = keys_file(tmp_path, [("alice", ""), ("bob", "")])
    content = [{"type": "image_url", "image_url": {"url": png()}, "uuid": "cat"}]
    async with RawBackend().listening() as backend, running(backend, keys_file=keys) as gateway:
        for name in ("alice", "bob", "alice"):
            got = await gateway.ask(key=f"{name}-key", messages=[{"role": "user", "content": content}])
            assert got.status_code == 200, got.text
        alice, bob, again = (one["messages"][0]["content"][0]["uuid"] for one in backend.received)
    assert alice == again != bob
    assert "cat" not in (alice, bob)


async def test_a_tenant_cannot_overtake_others_in_an_engine(tmp_path: Path) -> None:
    keys = keys_file(tmp_path, [("alice", "priority = 5")])
    async with RawBackend().listening() as backend, running(backend, keys_file=keys) as gateway:
        for priority, status in ((4, 400), (-1000, 400), ("-9", 400), (5, 200), (None, 200)):
            assert (await gateway.ask(key="alice-key", priority=priority)).status_code == status


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_early_is_not_free(tmp_path: Path, stream: bool) -> None:
    """A client that leaves just before its answer has used a backend, and its limits count that."""

    async def slow(write: Write, _: dict[str, Any]) -> None:
        if stream:
            await write(stream_head())
            for _ in range(400):
                await write(chunk(EVENT))
        await asyncio.sleep(30)

    keys = keys_file(tmp_path, [("alice", "requests_per_minute = 2")])
    async with RawBackend(slow).listening() as backend, running(backend, keys_file=keys) as gateway:
        for number in range(2):
            asking = asyncio.create_task(gateway.ask(key="alice-key", stream=stream, max_tokens=None))
            await soon(lambda number=number: len(backend.received) > number)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.wait_for(backend.gone.wait(), 5)
            backend.gone.clear()
        await soon(lambda: not gateway.gateway.services.running)
        assert (await gateway.ask(key="alice-key")).status_code == 429
        metrics = (await gateway.raw(b"{}", "/metrics", key="alice-key")).status_code
        assert metrics in (401, 403, 405)
        text = gateway.gateway.services.metrics.exposition().body.decode()
    counted = [line for line in text.splitlines() if 'kind="completion"' in line and "_total" in line]
    # 400 events of each stream, or the usual length of an answer that names none.
    assert float(counted[0].split()[-1]) >= (800 if stream else 512)


async def test_answers_that_come_too_late_count(tmp_path: Path) -> None:
    async def never(write: Write, _: dict[str, Any]) -> None:
        await asyncio.sleep(30)

    keys = keys_file(tmp_path, [("alice", "requests_per_minute = 1")])
    times = TimeoutSettings(total_s=0.2)
    async with (
        RawBackend(never).listening() as backend,
        running(backend, keys_file=keys, timeouts=times) as gateway,
    ):
        assert (await gateway.ask(key="alice-key")).status_code in (408, 504)
        assert (await gateway.ask(key="alice-key")).status_code == 429


async def test_an_api_key_does_not_open_the_administration() -> None:
    async with (
        RawBackend().listening() as backend,
        running(backend, api_keys=("secret",)) as gateway,
    ):
        for path in ("/admin/backends", "/admin/../admin/backends", "/admin/%62ackends", "//admin/backends",
                     "/Admin/backends", "/admin/backends/b0/drain", "/v1/../admin/backends"):  # fmt: skip
            for method in ("GET", "POST", "HEAD"):
                for key in ("secret", ""):
                    headers = {"authorization": f"Bearer {key}"} if key else {}
                    got = await gateway.client.request(method, path, headers=headers)
                    assert got.status_code in (401, 403, 404, 405), (method, path)
        assert not next(iter(gateway.gateway.services.fleet)).draining


def test_a_marker_of_the_cache_in_a_text_is_not_cached() -> None:
    """A text that equals an image's URL, or the mark that stands for it in keys, must not share an answer."""
    for texts, cached in ((["hello"], True), ([f"{MEDIA_MARK}0"], False)):
        content: list[Any] = [{"type": "image_url", "image_url": {"url": f"{MEDIA_MARK}0"}}]
        content += [{"type": "text", "text": text} for text in texts]
        body = {"temperature": 0, "messages": [{"role": "user", "content": content}]}
        key, _ = cacheability(body, ["0" * 64], scope="s", model_version="1")
        assert (key is not None) is cached


async def test_headers_of_a_client_are_data() -> None:
    async with RawBackend().listening() as backend, running(backend) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = json.dumps({"model": "m", "messages": []}).encode()
        for name, value in (
            (b"x-request-id", b"a b\tc"),
            (b"x-session-id", b"\xff\xfe"),
            (b"traceparent", b"\x7f"),
        ):
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n%b: %b\r\n"
                b"content-length: %d\r\n\r\n%b" % (CHAT.encode(), name, value, len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split(b" ")[1] in (b"200", b"400", b"502"), head
            assert value not in head
            if b"content-length: " not in head:
                break
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()


ODD: list[dict[str, Any]] = [
    {"session_id": "\ud800"}, {"user": "\ud800x"}, {"model": "\ud800"}, {"model": "x" * 5000},
    {"model": ["m"]}, {"messages": "hi"}, {"messages": None}, {"messages": 5},
    {"messages": [[{"content": "a"}], 5, None]},
    {"tools": "x"},
    {"stream_options": [1], "stream": True}, {"mm_processor_kwargs": [1]}, {"temperature": "0"},
    {"messages": [{"content": [{"image_url": {"url": png(), "detail": ["x"]}}]}]},
    {"messages": [{"content": [{"image_url": {"url": png(), "min_pixels": 10**30}}]}]},
    {"messages": [{"content": [{"source": {"data": "x" * 300, "media_type": {"a": 1}}}]}]},
    {"messages": [{"content": [{"source": {"data": "x" * 300, "media_type": 'image/png", "'}}]}]},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_odd_bodies_fail_nothing(path: str, tmp_path: Path) -> None:
    """Every body gets an answer or a refusal, and a line of names and numbers in the audit log."""
    audit = tmp_path / "audit.log"
    async with (
        RawBackend().listening() as backend,
        running(backend, audit_log=str(audit), api_keys=("the-key",)) as gateway,
    ):
        for body in ODD:
            assert (await gateway.ask(path, key="the-key", **body)).status_code < 500, body
        secret = [{"role": "user", "content": "a-secret-text"}]
        await gateway.ask(path, key="the-key", messages=secret, prompt="a-secret-text", input="a-secret-text")
        await soon(lambda: not gateway.gateway.services.running)
    lines = audit.read_text().splitlines()
    assert len(lines) == len(ODD) + 1
    assert not any(word in line for line in lines for word in ("a-secret-text", "the-key", "base64", "\n"))


async def test_pages_of_other_sites_reach_nothing_without_keys() -> None:
    """A page in a browser inside drained all backends by a POST, and read /admin by DNS rebinding."""
    routes = (
        "POST /admin/backends/b0/drain", "POST /admin/reload", "GET /admin/backends", f"POST {CHAT}",
        "GET /v1/models", "GET /metrics", "POST /v1/feedback",
    )  # fmt: skip
    rebound, evil = {"Host": "rebound.attacker.example"}, {"Origin": "https://attacker.example"}
    async with RawBackend().listening() as backend, running(backend) as gateway:
        for method, path in map(str.split, routes):
            for headers, code in ((rebound, "host_not_allowed"), (evil, "origin_not_allowed")):
                simple = {**headers, "Content-Type": "text/plain"}
                refused = await gateway.client.request(method, path, headers=simple)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
        assert (await gateway.client.get("/health", headers=rebound)).status_code == 200
        listed = (await gateway.client.get("/admin/backends")).json()["backends"]
        assert [one["draining"] for one in listed] == [False]


def user(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": "x", **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"images": [png()]}, "images[0]"),
        ({"messages": [user(images=[png().partition(",")[2]])]}, "messages[0].images[0]"),
        ({"messages": [user(images=["A" * 300, png() + "A" * 300])]}, "messages[0].images[1]"),
        (
            {"messages": [user(attachments=[{"image_url": {"url": "https://a/b"}}])]},
            "messages[0].attachments[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image": png()}]}]},
            "messages[0].content[0].image",
        ),
    ],
)  # fmt: skip
def test_a_picture_that_no_engine_reads_is_refused(fields: dict[str, Any], param: str) -> None:
    """Engines ignore fields that they do not know; the answer, and its bill, were about no picture."""
    body = parse(json.dumps({"model": "m", **fields}).encode())
    with pytest.raises(InvalidRequest, match="holds a picture") as caught:
        check_pictures(body, "chat")
    assert (caught.value.param, caught.value.code) == (param, "misplaced_image")


def test_pictures_that_engines_read_pass() -> None:
    part = {"type": "image_url", "image_url": {"url": png() + "A" * 300}}
    source = {"type": "image", "source": {"type": "base64", "data": png().partition(",")[2]}}
    messages = [{"role": "user", "content": [part, source, {"type": "text", "text": png()}]}]
    body = parse(
        json.dumps({"model": "m", "messages": messages, "guided_choice": ["a"], "extra": {"a": 1}}).encode()
    )
    check_pictures(body, "chat")


def test_a_translated_request_with_a_picture_elsewhere_is_refused() -> None:
    for api, inner in (
        ("messages", {"messages": [{"role": "user", "content": "x"}]}),
        ("responses", {"input": "x"}),
    ):
        body = parse(
            json.dumps({"model": "m", "max_tokens": 1, **inner, "images": [png() + "A" * 300]}).encode()
        )
        with pytest.raises(
            InvalidRequest, match=r"images\[0\]: this field is not read, and it holds a picture"
        ):
            to_chat(api, body.value, body.text, head=body.head)  # type: ignore[arg-type]
