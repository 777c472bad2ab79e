"""Bodies of requests: the reader, the models of the API, and the explanation of what is wrong."""

from __future__ import annotations

import json
from typing import Any

from fovea.api import schema
from fovea.api.convert import chat_prompt, completion_prompts, image_references, sampling, video_references
from fovea.api.cut_texts import restore
from fovea.api.cutter import Cutter
from fovea.api.unknown import header
from fovea.core.media import Payload
from fovea.server.bodies import _validated
from tests.fuzz.refusals import note, refusals

LONGEST = 8192
MODELS = (
    (schema.ChatRequest,),
    (schema.CompletionRequest,),
    (schema.TokenizeRequest,),
    (schema.ImageUpload,),
    (schema.ChatRequest, schema.CompletionRequest),
)
WORDS = (
    b'"messages"', b'"role"', b'"content"', b'"user"', b'"type"', b'"text"', b'"image_url"', b'"video_url"',
    b'"url"', b'"prompt"', b'"stop"', b'"logit_bias"', b'"stop_token_ids"', b'"visual_tokens"', b'"preset"',
    b'"max_tokens"', b'"temperature"', b'"n"', b'"data:image/png;base64,', b"[", b"]", b"{", b"}", b",", b":",
    b'"', b"\\", b"\\u", b"\\ud800", b"\\udc00", b"\\\"", b"null", b"true", b"1e400", b"1e-300", b"NaN",
    b'"response_format"', b'"json_schema"', b'"schema"', b'"guided_json"', b'"structured_outputs"',
    b"-Infinity", b"-0", b"9" * 600, b"[" * 101, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\0", b"a" * 300,
)  # fmt: skip


def target(data: bytes) -> None:
    """Read a body as the server does. Its first byte chooses route and strictness."""
    if not data:
        return
    models, text = MODELS[data[0] % len(MODELS)], data[1:]
    with refusals():
        body, ignored = _validated(_cut(text), models, lambda size: None, data[0] >= 128)
        header(ignored).encode("ascii")
        note(type(body).__name__)
        _compare(text)
        _convert(body)


def _cut(text: bytes) -> Cutter:
    cutter = Cutter()
    for at in range(0, len(text), 512):
        cutter.feed(text[at : at + 512])
    return cutter


def _compare(text: bytes) -> None:
    """A body that is accepted must have the values that Python's own parser reads in the whole text."""
    value = restore(_cut(text).finish())
    assert _plain(value) == _plain(json.loads(text.decode("utf-8-sig"))), "the reader changed the body"


def _plain(value: Any) -> str:
    def text_of(node: Any) -> Any:
        if isinstance(node, Payload):
            return bytes(node.data).decode()
        if isinstance(node, dict):
            return {key: text_of(entry) for key, entry in node.items()}
        return [text_of(entry) for entry in node] if isinstance(node, list) else node

    return json.dumps(text_of(value))


def _convert(body: Any) -> None:
    if isinstance(body, schema.ChatRequest | schema.CompletionRequest):
        sampling(body, {})
    if isinstance(body, schema.CompletionRequest):
        completion_prompts(body)
    if isinstance(body, schema.ChatRequest) and not (
        image_references(body.messages) or video_references(body.messages)
    ):
        chat_prompt(body, ())


def seeds() -> list[bytes]:
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo=" * 40, "detail": "low"},
    }
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": 'a\u2028\\"é' * 80}]}]
    }
    full = chat | {
        "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "stop": ["x"],
        "n": 2, "logit_bias": {"5": 1}, "stream": True, "stream_options": {"include_usage": True},
        "visual_tokens": {"preset": "fast"},
    }  # fmt: skip
    bodies: list[tuple[int, bytes]] = [
        (0, json.dumps(chat).encode()), (0, json.dumps(full, ensure_ascii=False).encode()),
        (0, json.dumps(full, indent=1).encode()), (1, b'{"prompt": "a", "max_tokens": 2}'),
        (1, b'{"prompt": [1, 2], "stop_token_ids": [1]}'), (1, b'{"prompt": [[1], [2]]}'),
        (2, b'{"prompt": "a"}'), (2, json.dumps(chat).encode()),
        (3, b'{"url": "https://example.com/a.png", "encode": false}'),
        (3, b'{"url": "' + b"data:image/png;base64," + b"AAAA" * 200 + b'"}'), (0, b"[" * 2000 + b"]" * 2000),
        (0, b""), (0, b"[]"), (0, b'{"messages": [' + b"[]," * 900 + b"[]]}"),
        (0, b'{"messages": [' + b'{"role": 1},' * 300 + b"{}]}"),
        (0, b"{" + b",".join(b'"k%d": 0' % number for number in range(700)) + b"}"),
        (1, b'{"prompt": [' + b"1," * 2000 + b"1]}"),
        (0, b'{"messages": [{"role": "user", "content": "' + b'\\"' * 2000 + b'"}]}'),
        (1, b'{"prompt": "\\ud83d\\ude00"}'), (1, b'{"prompt": "\\ud83d", "seed": ' + b"1" * 600 + b"}"),
        (1, b'{"prompt": "a", "prompt": "b"}'), (0, b"\xef\xbb\xbf{}"),
        (1, b'{"prompt": "a", "temperature": 1e-300, "repetition_penalty": 1e-300}'),
        (1, b'{"prompt": "a", "min_p": NaN}'), (1, b'{"prompt": "' + "é".encode() * 300 + b'"}'),
        (2, b'{"a\\u0000": 1, "' + b"k" * 400 + b'": 2}'),
    ]  # fmt: skip
    return [bytes([route]) + body for route, body in bodies]
