"""Answers with reasoning and tool calls in OpenAI's form: a joined stream is the complete body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fovea.api.completion_bodies import ChatBodies
from fovea.api.reading import Answer, Readers, Reading, finish_reason, new_call_id
from fovea.core.constraints import Tool, ToolCall, ToolUse
from fovea.core.types import Completion, Delta, FinishReason, StageTimings, TokenLogprob, Usage
from fovea.dialects.dialect import FORMATS, THINK, Dialect
from fovea.dialects.reader import Piece

HERMES = Dialect(FORMATS["hermes"], THINK)
USE = ToolUse((Tool("look", {"type": "object"}, {}), Tool("stop", {}, {})))
READING = Reading(HERMES, USE)
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "text": "It is sunny.",
    "nothing": "",
    "call": LOOK,
    "calls": f"{LOOK}\n{STOP}",
    "text and call": f"I will look.\n\n{LOOK}",
    "reasoning and text": "<think>\nhm\n</think>\n\nYes.",
    "reasoning and calls": f"<think>hm</think>{LOOK}\n{STOP}",
    "reasoning alone": "<think>and then",
    "all": f"<think>hm</think>So:\n{LOOK}\n{STOP}",
    "cut off": LOOK[:-20],
    "no call": '<tool_call>{"name": "none"}',
}


def completion(
    *texts: str, reason: FinishReason = "stop", thinking: bool = False, **fields: Any
) -> Completion:
    count = len(texts)
    fields = {"logprobs": ((),) * count, "stops": (None,) * count, **fields}
    return Completion(
        texts, ((1,),) * count, (reason,) * count, usage=Usage(5, 2), timings=StageTimings(),
        thinking=thinking, **fields,
    )  # fmt: skip


def deltas(text: str, size: int, index: int = 0, reason: FinishReason = "stop") -> list[Delta]:
    """An answer in deltas of `size` characters; the last one has no text."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(Delta(index, part, (1,)) for part in parts), Delta(index, "", (2,), finish_reason=reason)]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Join the chunks of one choice as clients do, by OpenAI's types."""
    message: dict[str, Any] = {"role": None, "content": None, "calls": [], "reasoning": "", "end": None}
    for chunk in chunks:
        parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in parsed.choices:
            if choice.index != index:
                continue
            assert message["end"] is None, "the finish reason is in the last chunk"
            delta = choice.delta
            message["role"] = delta.role or message["role"]
            if delta.content is not None:
                message["content"] = (message["content"] or "") + delta.content
            message["reasoning"] += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.index == len(message["calls"]):
                    assert call.id
                    assert call.type == "function"
                    message["calls"].append([call.function.name, ""])
                else:
                    assert (call.id, call.function.name) == (None, None), "the id is sent once"
                message["calls"][call.index][1] += call.function.arguments or ""
            message["end"] = choice.finish_reason
    return message


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_joined_stream_is_the_complete_body(name: str, size: int, reason: FinishReason) -> None:
    text = ANSWERS[name]
    parsed = ChatCompletion.model_validate(
        ChatBodies("m", reading=READING).complete([completion(text, reason=reason)]), strict=True
    )
    [choice] = parsed.choices
    bodies = ChatBodies("m", reading=READING)
    stream = joined([chunk for delta in deltas(text, size, reason=reason) for chunk in bodies.chunks(delta)])
    calls = [
        [c.function.name, c.function.arguments]
        for c in choice.message.tool_calls or []
        if c.type == "function"
    ]
    assert stream["calls"] == calls
    assert stream["reasoning"] == (choice.message.model_extra or {}).get("reasoning_content", "")
    assert stream["content"] == (choice.message.content or "")
    assert stream["role"] == "assistant"
    assert stream["end"] == choice.finish_reason


def test_the_body_of_calls() -> None:
    body = ChatBodies("m", reading=READING).complete([completion(ANSWERS["reasoning and calls"])])
    [choice] = body["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert json.loads(first["function"]["arguments"]) == {"at": "é"}
    assert second["function"] == {"name": "stop", "arguments": "{}"}


def test_choices_are_read_apart() -> None:
    """Two choices of one stream call different tools, and their chunks are mixed."""
    bodies = ChatBodies("m", reading=READING)
    pairs = zip(deltas(LOOK + STOP, 5, 0), deltas("<think>x</think>" + "y" * 84 + STOP, 5, 1), strict=False)
    chunks = [chunk for pair in pairs for delta in pair for chunk in bodies.chunks(delta)]
    assert [call[0] for call in joined(chunks, 0)["calls"]] == ["look", "stop"]
    assert joined(chunks, 1)["content"].startswith("yyy")
    assert joined(chunks, 1)["reasoning"] == "x"


def test_log_probabilities_reach_the_client_once() -> None:
    """Also those of tokens whose text is held back, or is a mark."""
    bodies, entries = ChatBodies("m", reading=READING), 0
    text = f"hi <think>{LOOK}"
    for number, char in enumerate(text):
        end: FinishReason | None = "stop" if number == len(text) - 1 else None
        delta = Delta(0, char, (1,), (TokenLogprob(number, char, -0.5),), end)
        for chunk in bodies.chunks(delta):
            parsed = ChatCompletionChunk.model_validate(chunk, strict=True)
            logprobs = parsed.choices[0].logprobs
            entries += len(logprobs.content or []) if logprobs else 0
    assert entries == len(text)


def test_reasoning_is_left_out_on_request() -> None:
    reading = Reading(HERMES, USE, with_reasoning=False)
    text = ANSWERS["reasoning and text"]
    assert reading.divide(text, False) == Answer("Yes.")
    readers = Readers(reading)
    pieces = [piece for delta in deltas(text, 3) for piece in readers.read(delta)]
    assert {piece.kind for piece in pieces} == {"content"}


def test_a_prompt_that_ends_inside_the_reasoning() -> None:
    assert READING.divide("hm</think>Yes.", True) == Answer("Yes.", "hm")
    readers = Readers(READING)
    assert readers.read(Delta(0, "hm</think>Yes.", thinking=True)) == [
        Piece("reasoning", "hm"),
        Piece("content", "Yes."),
    ]


def test_tools_that_may_not_be_called_are_not_looked_for() -> None:
    reading = Reading(HERMES, ToolUse(USE.tools, "none"))
    assert reading.divide(LOOK, False) == Answer(LOOK)


def test_a_model_without_a_dialect() -> None:
    text = f"<think>x</think>{LOOK} "
    assert Reading().divide(text, False) == Answer(text)


def test_an_answer_of_pieces() -> None:
    answer = Answer()
    for piece in (
        Piece("content", "a"),
        Piece("call", "f"),
        Piece("arguments", "{"),
        Piece("arguments", "}"),
    ):
        answer.add(piece)
    [call] = answer.calls
    assert (answer.content, call) == ("a", ToolCall("f", "{}", call.id))
    assert call.id.startswith("call_")


def test_readers_know_which_choice_made_a_call() -> None:
    readers = Readers(READING)
    readers.read(Delta(1, LOOK))
    readers.read(Delta(0, "text"))
    assert [readers.has_calls(index) for index in (0, 1, 2)] == [False, True, False]


@pytest.mark.parametrize(
    ("reason", "has_calls", "expected"),
    [("stop", True, "tool_calls"), ("stop", False, "stop"), ("length", True, "length"), (None, True, None)],
)
def test_the_reason_of_the_end(reason: FinishReason | None, has_calls: bool, expected: str | None) -> None:
    assert finish_reason(reason, has_calls) == expected


def test_ids_of_calls_are_unique() -> None:
    assert len({new_call_id() for _ in range(100)}) == 100
