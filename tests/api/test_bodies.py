"""Bodies of answers: OpenAI's client must be able to parse them."""

from __future__ import annotations

import json

from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fovea.api import sse
from fovea.api.completion_bodies import ChatBodies, CompletionBodies, add_usage
from fovea.api.errors import DEFECT, error_body
from fovea.api.logprobs import text_logprobs
from fovea.core.errors import CheckpointError, EngineError, InvalidImage, InvalidRequest, Overloaded
from fovea.core.types import Completion, Delta, StageTimings, TokenLogprob, Usage

LOGPROB = TokenLogprob(3, "é", -0.5, ((3, "é", -0.5), (4, "x", -1.5)))


def answer(*texts: str, logprobs: tuple[TokenLogprob, ...] = ()) -> Completion:
    count = len(texts)
    return Completion(
        texts,
        ((1, 2),) * count,
        ("stop",) * count,
        (logprobs,) * count,
        Usage(5, 2, 4, 3),
        StageTimings(ttft=0.25),
    )


def test_complete_chat_answer() -> None:
    body = ChatBodies("m").complete([answer("a", "b", logprobs=(LOGPROB,))])
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in parsed.choices] == ["a", "b"]
    assert parsed.choices[1].logprobs is not None
    assert parsed.choices[1].logprobs.model_dump()["content"] == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [0xC3, 0xA9],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
                {"token": "x", "logprob": -1.5, "bytes": [0x78]},
            ],
        }
    ]
    assert body["fovea"]["timings_ms"]["ttft"] == 250


def test_chat_chunks() -> None:
    bodies = ChatBodies("m")
    deltas = [
        Delta(0, "so"),
        Delta(1, ""),
        Delta(0, "", (7,)),
        Delta(0, "", (8,), (LOGPROB,)),
        Delta(1, "x", finish_reason="length"),
        Delta(0, "", finish_reason="stop", usage=Usage(1, 1)),
    ]
    chunks = [chunk for delta in deltas for chunk in bodies.chunks(delta)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    choices = [(c["index"], c["delta"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    assert choices == [
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "so"}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (0, {"content": ""}, None),
        (1, {"content": "x"}, "length"),
        (0, {}, "stop"),
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1
    last = ChatCompletionChunk.model_validate(bodies.closing(Usage(5, 2), True)[0], strict=True)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 7


def test_ids_are_unique() -> None:
    assert ChatBodies("m").id != ChatBodies("m").id
    assert CompletionBodies("m").id != CompletionBodies("m").id


def test_completions_of_several_prompts() -> None:
    body = CompletionBodies("m").complete([answer("a", "b"), answer("c", "d", logprobs=(LOGPROB,))])
    parsed = TextCompletion.model_validate(body, strict=True)
    assert [(choice.index, choice.text) for choice in parsed.choices] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    assert parsed.choices[0].logprobs is None
    assert body["choices"][2]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5, "x": -1.5}],
        "text_offset": [0],
    }
    assert parsed.usage is not None
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (10, 4)


def test_the_most_likely_of_tokens_with_one_text_counts() -> None:
    """Parts of characters are all written alike. The least likely one was reported, which harnesses take for
    the model's choice.
    """
    parts = tuple((number, chr(0xDC80 + number), -1.0 - number) for number in range(3))
    [top] = text_logprobs([TokenLogprob(9, "x", -7.5, (*parts, (4, "y", -5.0)))], 1)["top_logprobs"]
    assert list(top.items()) == [("\ufffd", -1.0), ("y", -5.0), ("x", -7.5)]


def test_completion_chunks() -> None:
    bodies = CompletionBodies("m")
    assert bodies.chunks(Delta(0, "", (7,))) == []
    (chunk,) = bodies.chunks(Delta(0, "x", (7,)))
    assert chunk["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]
    assert bodies.closing(Usage(1, 2), True)[0]["choices"] == []


def test_add_usage() -> None:
    assert add_usage([Usage(1, 2, 3, 4), Usage(10, 20, 30, 40)]) == Usage(11, 22, 33, 44)
    assert add_usage([]) == Usage()


def test_error_bodies() -> None:
    error = InvalidImage("no pixels").at(2, "messages[0].content[1]")
    assert error_body(error) == {
        "error": {
            "message": "image 2: no pixels",
            "type": "invalid_request_error",
            "param": "messages[0].content[1]",
            "code": "invalid_image",
        }
    }
    assert error_body(Overloaded("full", retry_after=1))["error"]["type"] == "rate_limit_error"


def test_event_is_one_line() -> None:
    """Python's splitlines, which some clients use, also ends lines at U+0085, U+2028 and U+2029."""
    payload = {"text": "two\nlines \u2028 é 🙂 \r \x85 \u2029", "key \u2028": 1}
    event = sse.event(payload)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event[6:]) == payload


def test_errors_repeat_little_of_a_request() -> None:
    """Attack: a JSON path of a hundred long names, and an unknown path of the server, came back whole."""
    body = error_body(InvalidRequest("x" * 10_000, param="messages[0]." + "k" * 10_000))["error"]
    assert len(body["message"]) == 500
    assert len(body["param"]) == 200
    assert body["param"].startswith("messages[0].kkk")
    short = error_body(InvalidRequest("no", param="n"))["error"]
    assert (short["message"], short["param"]) == ("no", "n")


def test_errors_that_are_not_for_clients_stay_in_the_log() -> None:
    assert error_body(CheckpointError("/home/x/weights is cut off"))["error"]["message"] == DEFECT
    assert error_body(EngineError("request 7 failed"))["error"]["message"] == "request 7 failed"
