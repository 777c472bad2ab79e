"""The gateway's readers: bodies of clients, media in them, and streams of backends."""

from __future__ import annotations

import json
from typing import Any

from fovea.api.cutter import Cutter
from fovea.gateway.generate.ends import EventStream
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import check_fields, media_parts
from fovea.gateway.usage.prices import Consumption, consumption_of, usage_of
from tests.fuzz.refusals import note, refusals

LONGEST = 8192
APIS = ("chat", "completions", "messages", "responses")
URL = "http://169.254.169.254/a"
"""A URL that must not be missed. It stands in many seeds."""
WORDS = (
    b'"model"', b'"mod\\u0065l"', b'"messages"', b'"input"', b'"role"', b'"content"', b'"type"', b'"text"',
    b'"image_url"', b'"video_url"', b'"audio_url"', b'"source"', b'"data"', b'"url"', b'"output"', b'"uuid"',
    b'"prompt"', b'"n"', b'"best_of"', b'"max_tokens"', b'"max_completion_tokens"', b'"stream"', b'"tools"',
    b'"session_id"', URL.encode(), b'"data:image/png;base64,', b'"image"', b'"input_image"', b"[", b"]", b"{",
    b"}", b",", b":", b'"', b"\\", b"\\ud800", b"null", b"true", b"1e400", b"NaN", b"-1", b"9" * 600,
    b"[" * 101, b"\xef\xbb\xbf", b"\0", b"a" * 300, b"data: ", b"\n\n", b"\r\n\r\n", b"[DONE]", b'"error"',
    b'"usage":{', b'"choices":[]', b'"response"', b'"prompt_tokens"', b'"completion_tokens"',
)  # fmt: skip


def target(data: bytes) -> None:
    """Read a body, or a stream if the first byte is odd. The other bits choose the API and the pieces."""
    if not data:
        return
    api, size, text = APIS[data[0] >> 1 & 3], 1 + (data[0] >> 3) * 17, data[1:]
    if data[0] & 1:
        _stream(api, size, text)
        return
    with refusals():
        _body(api, size, text)


def _body(api: str, size: int, text: bytes) -> None:
    cutter = Cutter()
    for at in range(0, len(text), size):
        cutter.feed(text[at : at + size])
    body = Body.parse(cutter)
    plain, sent = _parsed(text), _parsed(body.encoded())
    assert sent == plain, "a backend reads another body"
    check_fields(body.value, api)
    found = list(media_parts(body.value))
    held = {part.url for part in found}
    for key in ("messages", "input") if plain is not None else ():
        assert URL in held or not _holds(plain.get(key)), "an image was missed"
    demand = Demand(body, [])
    assert demand.prompt_tokens >= 0
    assert demand.answer_tokens >= 0
    note(f"{api} {len(found)} {demand.stream} {demand.answer_tokens > 256} {demand.prompt_tokens > 256}")


def _parsed(text: bytes) -> Any:
    """The value of a body; None: a long string, which the gateway passes on as it is, has a wrong escape."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except ValueError:
        return None


def _holds(node: Any) -> bool:
    """Whether a value holds the URL in the plainest form in which an engine reads it."""
    if isinstance(node, list):
        return any(map(_holds, node))
    if not isinstance(node, dict):
        return False
    for key in ("image_url", "video_url"):
        held = node.get(key)
        if held == URL or (isinstance(held, dict) and held.get("url") == URL):
            return True
    return any(_holds(node.get(key)) for key in ("content", "output"))


def _stream(api: str, size: int, text: bytes) -> None:
    """However the bytes are cut, the same bytes are passed on: all of them, or all but an event cut off."""
    whole, cut = EventStream(api), EventStream(api)
    expected = whole.feed(text) + whole.finish()
    passed = b"".join(cut.feed(text[at : at + size]) for at in range(0, len(text), size)) + cut.finish()
    assert text.startswith(expected)
    assert text.startswith(passed)
    for stream in (whole, cut):
        consumption_of(stream.usage(), Consumption())
    stripped = EventStream(api, strip_usage=True)
    assert len(stripped.feed(text) + stripped.finish()) <= len(text)
    consumption_of(usage_of(text), Consumption())
    note(f"{api} {whole.complete} {whole.failed} {whole.usage() is not None} {len(expected) == len(text)}")


def seeds() -> list[bytes]:
    image = {"type": "image_url", "image_url": {"url": URL}}
    bodies: list[Any] = [
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "a" * 300}]}]},
        {"model": "m", "messages": [{"image_url": "data:,", "content": [image, {**image, "uuid": "a"}]}]},
        {"messages": [{"content": [{"type": "tool_result", "content": [{"source": {"url": URL}}]}]}]},
        {"input": [{"type": "x", "output": {"image_url": URL}}, {"content": [{"image_url": URL}]}]},
        {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 5, "stream": True}, {"prompt": [1, 2, 3]},
        {"tools": [{"function": {"parameters": {"k" * 300: 1}}}], "session_id": "s" * 300}, {"prompt": [{}]},
        {"messages": [{"content": [{"type": "audio_url", "audio_url": URL}]}]}, {"max_tokens": -1}, [], "a",
        {"chat_template": "a"}, {"messages": {"content": {"image_url": {"url": URL}}}},
        {"n": 9999}, {"a": 1e9},
    ]  # fmt: skip
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    streams = [
        chunk * 3 + b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n',
        chunk + b'data: {"error": {"message": "a"}}\n\n', chunk.replace(b"\n", b"\r\n") + b"data: [DONE]",
        b'data: {"response": null, "x": {"usage":{}}}\n\n', b'data: {"error": ' + b"[" * 3000 + b"\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n', b'{"usage":{"prompt_tokens":1}}',
        b'data: {"response": {"usage":{"input_tokens":1,"output_tokens":2}}}\n\n', 
        b"data: \xff\n\n" + chunk[:9], b"\n" * 50,
    ]  # fmt: skip
    written = [json.dumps(body).encode() for body in bodies]
    written += [b'{"mod\\u0065l": "a", "model": "b"}', b"\xef\xbb\xbf{}", b'{"a": NaN}', b'{"a": 1e400}', b""]
    return [
        *(bytes([number % 4 << 1 | 16]) + body for number, body in enumerate(written)),
        *(bytes([number % 4 << 1 | 1 | 16]) + stream for number, stream in enumerate(streams)),
    ]
