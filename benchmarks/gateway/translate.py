"""Measure the processor time of the translation of other APIs to chat completions and back.

    python benchmarks/gateway/translate.py [--seconds 1.0]

For /v1/messages and /v1/responses it prints the microseconds of processor time per request (a short question,
and a conversation of 20 turns with tools and images, whose long strings are placeholders), per complete
answer, and per event of a stream: chunks that arrive one by one, with a word each or a piece of a call.
Parsing and writing of JSON is included for streams alone. Each figure is the median of many rounds. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from fovea.api import sse
from fovea.gateway.translate.translation import Api, ChatTranslation, to_chat

APIS: tuple[Api, ...] = ("messages", "responses")
EVENTS = 200
PLACEHOLDER = "0123456789abcdef0123456789abcdef:0"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
USAGE = {"prompt_tokens": 900, "completion_tokens": 200, "total_tokens": 1100}


def short(api: Api) -> dict[str, Any]:
    """A question without anything else."""
    if api == "messages":
        return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    return {"model": "m", "input": "hello", "max_output_tokens": 9}


def agent(api: Api) -> dict[str, Any]:
    """A conversation of 20 turns with ten tools, an image per question, and long texts."""
    names = [f"tool_{number}" for number in range(10)]
    if api == "responses":
        image = {"type": "input_image", "image_url": PLACEHOLDER}
        items: list[dict[str, Any]] = []
        for number in range(10):
            call = {"type": "function_call", "call_id": f"c{number}", "name": "tool_1", "arguments": "{}"}
            words = {"type": "input_text", "text": PLACEHOLDER}
            items += [{"role": "user", "content": [image, words]}, call]
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": PLACEHOLDER})
        tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
        return {"model": "m", "input": items, "tools": tools, "instructions": PLACEHOLDER, "stream": True}
    source = {"type": "base64", "media_type": "image/png", "data": PLACEHOLDER}
    messages: list[dict[str, Any]] = []
    for number in range(10):
        call = {"type": "tool_use", "id": f"c{number}", "name": "tool_1", "input": {"path": "a", "line": 1}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": PLACEHOLDER}
        words = {"type": "text", "text": PLACEHOLDER}
        messages += [
            {"role": "user", "content": [{"type": "image", "source": source}, words]},
            {"role": "assistant", "content": [words, call]},
            {"role": "user", "content": [result]},
        ]
    own = [{"name": name, "input_schema": SCHEMA} for name in names]
    fields = {"system": PLACEHOLDER, "tools": own, "stream": True, "max_tokens": 9}
    return {"model": "m", "messages": messages, **fields}


def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return sse.event({**head, "choices": [choice]})


def words() -> list[bytes]:
    return [chunk({"content": " word"})] * EVENTS


def arguments() -> list[bytes]:
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    piece = {"index": 0, "function": {"arguments": '{"a": '}}
    return [chunk({"tool_calls": [head]}), *[chunk({"tool_calls": [piece]})] * (EVENTS - 1)]


END = [chunk({}, "stop"), sse.event({"choices": [], "usage": USAGE}), sse.DONE]


def run_stream(chat: ChatTranslation, chunks: list[bytes]) -> None:
    translator = chat.translator()
    for part in chunks:
        translator.feed(part)
    for part in END:
        translator.feed(part)
    assert translator.ended
    assert not translator.failed


def microseconds(action: Callable[[], object], seconds: float) -> float:
    """The median processor time of an action, over rounds of about a millisecond."""
    rounds, times, until = 1, [], time.monotonic() + seconds
    while time.monotonic() < until:
        start = time.process_time_ns()
        for _ in range(rounds):
            action()
        taken = (time.process_time_ns() - start) / 1000
        times.append(taken / rounds)
        if taken < 1000:
            rounds *= 2
    return statistics.median(times)


def figures(api: Api, seconds: float) -> dict[str, float]:
    """All figures of one API, in microseconds."""
    question, conversation = short(api), agent(api)
    chat = to_chat(api, question)
    message = {"role": "assistant", "content": "word " * 50, "reasoning_content": "word " * 50}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
    texts, calls = words(), arguments()
    return {
        "request": microseconds(lambda: to_chat(api, question), seconds),
        "request of 20 turns": microseconds(lambda: to_chat(api, conversation), seconds),
        "complete answer": microseconds(lambda: chat.answer(200, body), seconds),
        "stream without text": microseconds(lambda: run_stream(chat, []), seconds),
        "text event": microseconds(lambda: run_stream(chat, texts), seconds) / EVENTS,
        "call event": microseconds(lambda: run_stream(chat, calls), seconds) / EVENTS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measurement per figure")
    options = parser.parse_args()
    found = {api: figures(api, options.seconds) for api in APIS}
    print(f"{'microseconds':<22}{'messages':>10}{'responses':>11}")
    for name in found["messages"]:
        print(f"{name:<22}{found['messages'][name]:>10.1f}{found['responses'][name]:>11.1f}")
    print(json.dumps({api: {name: round(us, 2) for name, us in rows.items()} for api, rows in found.items()}))


if __name__ == "__main__":
    main()
