"""What a client can get wrong, each with the answer that tells it so; after all of it the server serves on."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.media.samples import animation, png_header, sample
from tests.server.conftest import MAX_BODY_MIB, MAX_IMAGE_BYTES, MAX_IMAGES
from tests.server.support import Server, chat, data_url, image, picture, text, until, user

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
URL = "messages[0].content[0].image_url.url"
GOOD = data_url(picture())


@dataclass(frozen=True)
class Case:
    """says: a pattern that the message holds. body: JSON, or bytes as they are."""

    name: str
    says: str
    body: Any
    param: str | None = None
    status: int = 400
    code: str = "invalid_value"
    path: str = CHAT


def of_url(name: str, says: str, url: str, *, status: int = 400, code: str = "invalid_image") -> Case:
    return Case(name, f"image 0: .*{says}", chat(user(image(url))), URL, status, code)


def of_data(name: str, says: str, data: bytes, *, code: str = "invalid_image") -> Case:
    return of_url(name, says, data_url(data), code=code)


def of_field(name: str, value: Any, says: str, *, param: str | None = None, **extra: Any) -> Case:
    field = name.partition(" ")[0]
    return Case(name, says, chat(**{field: value}), param or field, **extra)


def of_message(name: str, message: Any, says: str, param: str, **extra: Any) -> Case:
    return Case(name, says, chat(message), param, **extra)


def of_text(name: str, says: str, param: str | None, *, code: str = "invalid_value", **fields: Any) -> Case:
    return Case(name, says, {"prompt": "the", **fields}, param, code=code, path=TEXT)


def refused_url(name: str, says: str, url: str) -> Case:
    return of_url(name, says, url, status=403, code="url_not_allowed")


PNG = picture(40, 30)
IMAGES = [
    of_data("truncated png", "trunc|decoded|corrupt", PNG[: len(PNG) // 2], code="image_truncated"),
    of_data("truncated within its header", "within its header", PNG[:20], code="image_truncated"),
    of_data("truncated jpeg", "JPEG", sample("JPEG")[:-200], code="image_truncated"),
    of_data("corrupt pixels", "PNG", png_header(64, 64)),
    of_data("html page", "an HTML page", b"<!DOCTYPE html><html></html>", code="unsupported_image_type"),
    of_data("svg drawing", "an SVG drawing", b"<svg xmlns='x'></svg>", code="unsupported_image_type"),
    of_data("pdf", "a PDF document", b"%PDF-1.7 ....", code="unsupported_image_type"),
    of_data("plain text", "plain text; accepted: .*PNG", b"hello there", code="unsupported_image_type"),
    of_data("random bytes", "unknown data", bytes(range(200, 255)), code="unsupported_image_type"),
    of_data("bomb by header", "50000x50000", png_header(50_000, 50_000), code="image_too_large"),
    of_data("too many pixels", "accepted: at most", png_header(16_000, 16_000), code="image_too_large"),
    of_data("no pixels", "0x8", png_header(0, 8)),
    of_data("a line of pixels", "aspect ratio", sample("PNG", 1000, 2), code="image_too_long"),
    of_data("animated gif", "animated with 3 frames", animation("GIF"), code="image_animated"),
    of_data("animated webp", "animated with 3 frames", animation("WEBP"), code="image_animated"),
    of_data("too many bytes", f"accepted: at most {MAX_IMAGE_BYTES}", PNG + bytes(MAX_IMAGE_BYTES), code="image_too_large"),
    of_url("no data", "no data", "data:image/png;base64,"),
    of_url("bad base64", "base64", "data:image/png;base64,@@not*base64@@"),
    of_url("cut base64", "base64", "data:image/png;base64,iVBOR"),
    of_url("not base64 at all", "base64", "data:image/png,rawdata", code="invalid_image_url"),
    of_url("bare base64", "data:image", base64.b64encode(PNG).decode(), code="invalid_image_url"),
    of_url("a path", "accepted: data:image", "/etc/passwd", code="invalid_image_url"),
    of_url("unknown scheme", "scheme 'gopher'", "gopher://example.com/x.png", code="invalid_image_url"),
    of_url("ftp", "scheme 'ftp'", "ftp://example.com/x.png", code="invalid_image_url"),
    of_url("javascript", "scheme 'javascript'", "javascript:alert(1)", code="invalid_image_url"),
    refused_url("file outside the root", "leaves the folder", "file:///etc/passwd"),
    refused_url("file by dots", "leaves the folder", "file://{files}/../secret.png"),
    refused_url("file by encoded dots", "leaves the folder", "file://{files}/%2e%2e/secret.png"),
    refused_url("file by a link", "leaves the folder", "file://{files}/link.png"),
    refused_url("folder as file", "not a regular file", "file://{files}"),
    refused_url("file of another host", "host", "file://example.com/x.png"),
    of_url("no such file", "cannot be read", "file://{files}/none.png", code="image_fetch_failed"),
    refused_url("loopback", "not a public host", "http://127.0.0.1/x.png"),
    refused_url("loopback by name", "not a public host", "http://localhost/x.png"),
    refused_url("loopback v6", "not a public host", "http://[::1]/x.png"),
    refused_url("loopback as a number", "not a public host", "http://2130706433/x.png"),
    refused_url("mapped loopback", "not a public host", "http://[::ffff:127.0.0.1]/x.png"),
    refused_url("metadata service", "not a public host", "http://169.254.169.254/latest/meta-data/"),
    refused_url("private network", "not a public host", "https://10.0.0.1/x.png"),
    refused_url("port", "port 8080", "http://93.184.216.34:8080/x.png"),
    refused_url("credentials", "user name or password", "https://user:pass@example.com/x.png"),
    of_url("url without host", "host", "http:///x.png", code="invalid_image_url"),
    of_url("url with a space", "space", "https://example.com/a b.png", code="invalid_image_url"),
    Case("empty url", "at least 1 character", chat(user(image(""))), URL),
    Case(
        "too many images", f"{MAX_IMAGES + 1} images; accepted: at most {MAX_IMAGES}",
        chat(user(*[image(GOOD)] * (MAX_IMAGES + 1))),
        f"messages[0].content[{MAX_IMAGES}].image_url.url", code="too_many_images",
    ),
    Case(
        "second image is the bad one", "image 1: .*HTML",
        chat(user("look", image(GOOD), image(data_url(b"<html>")))),
        "messages[0].content[2].image_url.url", code="unsupported_image_type",
    ),
    Case("image by a system message", "not in system messages", chat({"role": "system", "content": [image(GOOD)]}),
         "messages[0].content[0]"),
    Case("image by an assistant", "not in assistant messages",
         chat(user("hi"), {"role": "assistant", "content": [text("so"), image(GOOD)]}), "messages[1].content[1]"),
    Case("unknown detail", "'low'.*'high'", chat(user(image(GOOD, detail="ultra"))),
         "messages[0].content[0].image_url.detail"),
    Case("max_pixels too small", "max_pixels is 10; .*accepts 1024", chat(user(image(GOOD, max_pixels=10))), "max_pixels"),
    Case("max_pixels too large", "max_pixels is 99999999", chat(user("hi", image(GOOD)), max_pixels=99_999_999), "max_pixels"),
    Case("max_pixels zero", "greater than or equal to 1", chat(user(image(GOOD, max_pixels=0))),
         "messages[0].content[0].image_url.max_pixels"),
    Case("min_pixels over max_pixels", "min_pixels", chat(user(image(GOOD, min_pixels=90_000, max_pixels=5000))), "min_pixels"),
    Case("unknown field of an image", "unknown field .*did you mean 'detail'", chat(user(image(GOOD, details="low"))),
         "messages[0].content[0].image_url.details", code="unknown_field"),
    Case("image_url as a string", "must be an object", chat(user({"type": "image_url", "image_url": GOOD})),
         "messages[0].content[0].image_url"),
    Case("image without image_url", "image_url is required", chat(user({"type": "image_url"})),
         "messages[0].content[0].image_url", code="missing_field"),
    Case("audio part", "'input_audio'.*'text', 'image_url'", chat(user({"type": "input_audio", "input_audio": {}})),
         "messages[0].content[0]"),
    Case("marker in text", "may not stand in the text", chat(user("a <|image_pad|> b")), "messages"),
    Case("marker beside an image", "2 image markers .* for 1 images", chat(user(image(GOOD), "<|image_pad|>")), "messages"),
]  # fmt: skip

MALFORMED = [
    Case("nothing", "the body is required|body", b"", None, code="missing_field"),
    Case("not json", "the body is not JSON", b"hello", None, code="invalid_json"),
    Case("half json", "the body is not JSON", b'{"messages": [', None, code="invalid_json"),
    Case("trailing text", "the body is not JSON", b'{"messages": []} x', None, code="invalid_json"),
    Case("not utf-8", "the body", b'{"messages": "\xff\xfe"}', None, code="invalid_json"),
    Case("deep nesting", "the body", b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, code="invalid_json"),
    Case("huge number", "the body", b'{"seed": ' + b"9" * 5000 + b"}", None, code="invalid_json"),
    Case("array", "the body: must be an object", [1, 2], None),
    Case("string", "the body: must be an object", "hello", None),
    Case("null", "the body: must be an object", b"null", None),
    Case("no messages", "messages is required", {}, "messages", code="missing_field"),
    Case("nan", "temperature: ", b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', "temperature"),
    Case("infinity", "temperature: ", b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', "temperature"),
    Case("half a surrogate pair", "not valid Unicode", b'{"messages":[{"role":"user","content":"\\ud800"}]}',
         "messages[0].content"),
    Case("half a pair in a part", "not valid Unicode",
         b'{"messages":[{"role":"user","content":[{"type":"text","text":"\\udfff x"}]}]}',
         "messages[0].content[0].text"),
    Case("half a pair in a field's name", "not valid Unicode", b'{"messages":[{"role":"user","content":"x"}],"\\ud800":1}', None),
    Case("half a pair as a model", "not valid Unicode",
         b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}', "model"),
    Case("half a pair in a url", "not valid Unicode",
         b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://\\ud800"}}]}]}',
         "messages[0].content[0].image_url.url"),
    Case("half a pair as a prompt", "not valid Unicode", b'{"prompt":"\\ud800"}', "prompt", path=TEXT),
]  # fmt: skip

UNSUPPORTED = {"code": "unsupported_field"}
PARAMETERS = [
    of_field("temperature", 2.5, "less than or equal to 2, got 2.5"),
    of_field("temperature negative", -0.1, "greater than or equal to 0"),
    of_field("temperature as text", "hot", "must be a number, got 'hot'"),
    of_field("temperature as a flag", True, "must be a number"),
    of_field("top_p", 0, "greater than 0"),
    of_field("top_p high", 1.01, "less than or equal to 1"),
    of_field("top_k", -1, "greater than or equal to 0"),
    of_field("top_k in parts", 1.5, "integer"),
    of_field("top_k enormous", 10**400, "less than or equal to 2147483648"),
    of_field("min_tokens enormous", 10**400, "less than or equal to 2147483648"),
    of_field("temperature enormous", 10**400, "number|less than"),
    of_field("min_p", 1.5, "less than or equal to 1"),
    of_field("repetition_penalty", 0, "greater than 0"),
    of_field("repetition_penalty as a list", [1], "number"),
    of_field("presence_penalty", 2.1, "less than or equal to 2"),
    of_field("frequency_penalty", -2.1, "greater than or equal to -2"),
    of_field("seed", 2**63, "less than"),
    of_field("seed as text", "7", "integer"),
    of_field("n", 17, "less than or equal to 16"),
    of_field("n zero", 0, "greater than or equal to 1"),
    of_field("max_tokens", 0, "greater than or equal to 1"),
    of_field("max_tokens as text", "many", "integer"),
    of_field("max_tokens enormous", 10**400, "less than or equal to 2147483648"),
    of_field("max_tokens over the context", 5000, "context of 4096 has room for", code="context_length_exceeded"),
    Case("max_completion_tokens over the context", "max_completion_tokens is 5000",
         {"messages": [user("hi")], "max_completion_tokens": 5000}, "max_completion_tokens", code="context_length_exceeded"),
    Case("two limits", "max_tokens and max_completion_tokens differ", chat(max_completion_tokens=9), "max_tokens"),
    of_field("min_tokens", -1, "greater than or equal to 0"),
    of_field("min_tokens over max_tokens", 9, r"min_tokens \(9\) must not exceed max_tokens \(4\)"),
    of_field("stop", "", "non-empty"),
    of_field("stop with an empty one", ["a", ""], "non-empty"),
    of_field("stop with too many", ["a"] * 17, "16"),
    of_field("stop as a number", 5, "string"),
    of_field("stop_token_ids", [-1], r"\[0, "),
    of_field("stop_token_ids too large", [10**6], r"outside \[0, 384\)"),
    of_field("stop_token_ids as text", ["a"], "integer", param="stop_token_ids[0]"),
    of_field("logit_bias", {"five": 1}, "'five' is not a token id"),
    of_field("logit_bias of signs", {"--5": 1}, "'--5' is not a token id"),
    of_field("logit_bias of digits", {"9" * 5000: 1}, "is not a token id"),
    of_field("logit_bias outside", {"999999": 1}, r"outside \[0, 384\)"),
    of_field("logit_bias too strong", {"5": 101}, r"\[-100, 100\]", param="logit_bias[5]"),
    of_field("logit_bias as a list", [1], "must be an object"),
    of_field("logit_bias too many", {str(i): 0 for i in range(1025)}, "1024"),
    of_field("logprobs", "yes", "boolean"),
    Case("top_logprobs", "less than or equal to 20", chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    of_field("top_logprobs alone", 3, "needs logprobs: true"),
    of_field("stream", "yes", "boolean"),
    of_field("stream_options without stream", {"include_usage": True}, "stream: true"),
    Case("stream_options of another kind", "unknown field", chat(stream=True, stream_options={"include_cost": True}),
         "stream_options.include_cost", code="unknown_field"),
    of_field("timeout", 0, "greater than 0"),
    of_field("timeout endless", 10**9, "less than or equal to 86400"),
    of_field("cache_salt", "x" * 257, "at most 256"),
    of_field("ignore_eos", 1, "boolean"),
    of_field("skip_special_tokens", "no", "boolean"),
    of_field("response_format", {"type": "json_schema", "json_schema": {}}, "must be 'text'", param="response_format.type"),
    of_field("response_format json", {"type": "json_object"}, "'text'", param="response_format.type"),
    of_field("tools", [{"type": "function", "function": {"name": "f"}}], "tool calls are not supported", **UNSUPPORTED),
    of_field("tool_choice", "auto", "tool calls are not supported", **UNSUPPORTED),
    of_field("functions", [], "tool calls are not supported", **UNSUPPORTED),
    of_field("audio", {"voice": "x", "format": "wav"}, "audio is not supported", **UNSUPPORTED),
    of_field("modalities", ["audio"], "only text is produced", **UNSUPPORTED),
    of_field("reasoning_effort", "high", "not supported", **UNSUPPORTED),
    of_field("temprature", 0.5, "did you mean 'temperature'", code="unknown_field"),
    of_field("x" * 500_000, 1, "unknown field 'x*[.]{3}'", param="x" * 64 + "...", code="unknown_field"),
    of_field("metadata", {"y" * 5000: "a"}, "at most 4096", param="metadata." + "y" * 64 + "..."),
    of_field("best_guess", 1, "unknown field 'best_guess'", code="unknown_field"),
    of_field("model", "gpt-9", "'gpt-9' is not served here; served: tiny", status=404, code="model_not_found"),
    of_field("model of another name", "z" * 4000, "'z+[.]{3}z+' is not served", status=404, code="model_not_found"),
    of_field("model as a number", 5, "string"),
    of_field("messages empty", [], "at least 1"),
    of_field("messages as text", "hello", "list"),
    of_field("messages of text", ["hello"], "must be an object", param="messages[0]"),
    of_message("role", {"role": "wizard", "content": "x"}, "'system', 'developer', 'user' or 'assistant'", "messages[0].role"),
    of_message("role tool", {"role": "tool", "content": "x", "tool_call_id": "1"}, "must be 'system', .*, got 'tool'", "messages[0].role"),
    of_message("no role", {"content": "x"}, "messages.0..role is required", "messages[0].role", code="missing_field"),
    of_message("no content", {"role": "user"}, "needs content", "messages[0].content"),
    of_message("empty parts", {"role": "user", "content": []}, "needs content", "messages[0].content"),
    of_message("content as a number", {"role": "user", "content": 5}, "a valid string or a valid list", "messages[0].content"),
    of_message("part as text", {"role": "user", "content": ["x"]}, "must be an object", "messages[0].content[0]"),
    of_message("part without type", {"role": "user", "content": [{"text": "x"}]}, "type is required", "messages[0].content[0].type", code="missing_field"),
    of_message("part of another type", user({"type": "input_audio"}), "'input_audio'", "messages[0].content[0]"),
    of_message("text part without text", user({"type": "text"}), "text is required", "messages[0].content[0].text", code="missing_field"),
    of_message("text part with a number", user({"type": "text", "text": 5}), "string", "messages[0].content[0].text"),
    of_message("unknown field of a message", {"role": "user", "content": "x", "colour": "red"}, "unknown field",
               "messages[0].colour", code="unknown_field"),
    of_message("tool calls in a message", {"role": "assistant", "content": "x", "tool_calls": []}, "tool calls are not supported",
               "messages[0].tool_calls", code="unsupported_field"),
    of_text("echo", "echo is not supported", "echo", echo=True, **UNSUPPORTED),
    of_text("best_of", "use n", "best_of", best_of=3, **UNSUPPORTED),
    of_text("suffix", "suffix is not supported", "suffix", suffix="x", **UNSUPPORTED),
    of_text("completion logprobs", "less than or equal to 20", "logprobs", logprobs=21),
    of_text("no prompt", "prompt is empty", "prompt", prompt=""),
    of_text("no prompts", "prompt is empty", "prompt", prompt=[]),
    of_text("an empty list of ids", "prompt is empty", "prompt", prompt=[[]]),
    of_text("ids outside", r"outside the vocabulary", "prompt", prompt=[1, 2, 999]),
    of_text("a negative id", "outside the vocabulary", "prompt", prompt=[-1]),
    of_text("the image's own id", "stands for an image", "prompt", prompt=[5]),
    of_text("the image's marker", "image marker", "prompt", prompt="a <|image_pad|>"),
    of_text("mixed prompts", "string", "prompt[1]", prompt=["a", 1]),
    of_text("a prompt of another kind", "must be a valid string or a valid list", "prompt", prompt={"a": 1}),
    of_text("too many prompts", "65 prompts; accepted: at most 64", "prompt", prompt=["a"] * 65),
    of_text("stream of two prompts", "a stream takes one prompt", "prompt", prompt=["a", "b"], stream=True),
    of_text("messages to completions", "unknown field 'messages'", "messages", messages=[], code="unknown_field"),
    Case("no prompt field", "prompt is required", {}, "prompt", code="missing_field", path=TEXT),
    Case("tokenize nothing", "either prompt or messages", {}, "prompt", path=TOKENIZE),
    Case("tokenize both", "either prompt or messages", {"prompt": "a", "messages": [user("b")]}, "prompt", path=TOKENIZE),
    Case("tokenize no messages", "at least 1", {"messages": []}, "messages", path=TOKENIZE),
    Case("tokenize an unknown field", "did you mean 'prompt'", {"promt": "a"}, "promt", code="unknown_field", path=TOKENIZE),
    Case("tokenize for another model", "not served", {"model": "x", "prompt": "a"}, "model", 404, "model_not_found", TOKENIZE),
]  # fmt: skip

LONG = "the red circle " * 3000
SIZES = [
    Case("prompt too long", "the prompt has .* tokens .*the context holds 4096", chat(user(LONG)), "messages",
         code="context_length_exceeded"),
    Case("prompt too long beside images", r"\(12 of them visual, 2 images\)", chat(user(image(GOOD), image(GOOD), LONG)),
         "messages", code="context_length_exceeded"),
    Case("text too long", "the prompt has .* tokens", {"prompt": LONG}, "prompt", code="context_length_exceeded", path=TEXT),
    Case("body too large", f"accepted: at most {MAX_BODY_MIB * 2**20} bytes", chat(user("x" * (MAX_BODY_MIB * 2**20))), None, 413,
         "payload_too_large"),
]  # fmt: skip
MANY = "too many values; accepted: at most 50000, not counting token ids"
CROWDS = [
    Case("a crowd of messages", "at most 4096 items", chat(*[user("x")] * 5000), "messages"),
    Case("a crowd of parts", "at most 4096 items", chat({"role": "user", "content": [text("x")] * 5000}), "messages[0].content"),
    Case("a crowd of wrong parts", MANY, chat(user(*[{"type": "x"}] * 60_000)), None),
    Case("a crowd of wrong parts in several messages", MANY, chat(*[user(*[{"type": "x"}] * 4000)] * 10), None),
    Case("a crowd of unknown fields", MANY, chat(**{f"f{i}": 1 for i in range(60_000)}), None),
    Case("a crowd of unknown fields in messages", MANY, chat(*[{f"f{i}": "" for i in range(100)}] * 1000), None),
    Case("a crowd of biases", "at most 1024 items", chat(logit_bias={str(i): 1 for i in range(5000)}), "logit_bias"),
    Case("a crowd of metadata", "at most 64 items", chat(metadata={str(i): "" for i in range(65)}), "metadata"),
    Case("a crowd of stops", "at most 64 items", chat(stop=["x"] * 65), "stop"),
    Case("a crowd of prompts", "at most 1024 items", {"prompt": ["x"] * 2000}, "prompt", path=TEXT),
    Case("a crowd of flags as ids", MANY, {"prompt": [True] * 60_000}, None, path=TEXT),
    Case("a crowd of ids", "the prompt has 300000 tokens", {"prompt": [60] * 300_000}, "prompt",
         code="context_length_exceeded", path=TEXT),
    Case("a crowd of texts to count", MANY, {"messages": [user(*[{"type": "x"}] * 60_000)]}, None, path=TOKENIZE),
]  # fmt: skip
CASES = IMAGES + MALFORMED + PARAMETERS + SIZES + CROWDS


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def expect_error(answer: httpx.Response, status: int, says: str, param: str | None, code: str) -> None:
    """OpenAI's envelope, exactly."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(says, error["message"], re.DOTALL), error
    assert error["type"].endswith("_error")
    assert (error["param"], error["code"]) == (param, code), error
    assert len(error["message"]) < 600


def send(client: httpx.Client, case: Case, server: Server) -> httpx.Response:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    content = content.replace(b"{files}", str(server.files).encode())
    return client.post(case.path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name[:40])
def test_table(client: httpx.Client, server: Server, case: Case) -> None:
    expect_error(send(client, case, server), case.status, case.says, case.param, case.code)


def test_the_table_is_long_and_names_are_unique() -> None:
    assert len(CASES) >= 50
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_no_depth_is_a_defect(client: httpx.Client, kind: str) -> None:
    """Somewhere the parser gives up; on the way there neither validation nor the error's text may."""
    close = {"[": "]", '{"a":': "}"}[kind]
    for depth in (*range(100, 1100, 50), 10_000):
        for field in ("messages", "metadata", "nonsense"):
            body = f'{{"{field}":{kind * depth}1{close * depth}}}'
            answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, (depth, field)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/chat", 404, "unknown_url"),
        ("GET", "/" + "x" * 5000, 404, "unknown_url"),
        ("GET", "/%ff%fe", 404, "unknown_url"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
def test_wrong_addresses(client: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    answer = client.request(method, path)
    expect_error(answer, status, "is not accepted at|there is no|is not served", None, code)
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_that_does_not_say_it_is_json(client: httpx.Client, kind: str) -> None:
    answer = client.post(CHAT, content=json.dumps(chat()), headers={"Content-Type": kind})
    expect_error(answer, 400, "Content-Type: application/json", None, "invalid_json")


def raw(server: Server, *pieces: bytes) -> bytes:
    """What the server answers to bytes as they are, up to the end of its first body."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as wire:
        for piece in pieces:
            wire.sendall(piece)
        answer = b""
        while b'"payload_too_large"}}' not in answer and (more := wire.recv(65536)):
            answer += more
    return answer


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_an_announced_body_that_is_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    answer = raw(server, HEAD + b"Content-Length: 999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body has 999999999 bytes; accepted: at most 2097152 bytes (2 MiB)" in answer


def test_an_unannounced_body_that_is_too_large_is_refused_while_it_arrives(server: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = raw(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * (MAX_BODY_MIB * 16 + 1))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"accepted: at most 2097152 bytes (2 MiB)" in answer


def test_after_all_of_it_the_server_serves_on(client: httpx.Client, server: Server) -> None:
    """The whole table again, eight requests at a time, and then what everybody else asks."""
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda case: send(client, case, server).status_code, CASES))
    assert statuses == [case.status for case in CASES]
    answer = client.post(CHAT, json=chat(user(image(GOOD), "what is it?")))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    until(lambda: server.metrics()["fovea:kv_blocks_used"] == 0)
    assert server.metrics()["fovea:integrity_errors_total"] == 0
    server.engine.check_integrity()
