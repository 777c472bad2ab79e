"""Writes complete answers as JSON without stopping other clients.

Log probabilities make an answer large: 16 choices of 1000 tokens with 20 alternatives each are 20 MB.
Building and writing them in the event loop would take seconds. A large answer is written in a thread, the log
probabilities of a few tokens at a time: no other thread runs during a call of Python's JSON encoder, nor
during a garbage collection, which a million objects would set off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fovea.core.json_text import dump
from fovea.core.types import Completion, TokenLogprob
from fovea.server.request import Request

LARGE = 500
"""Log probabilities, alternatives included, that an answer may have to be written in the event loop."""
LONG = 8192
"""Characters that an answer may have to be read in the event loop. Calls are read character by character."""
BATCH = 64
"""Longest list that is written entry by entry, and entries of a longer one that are written in one call."""
_PIECE = 64 * 1024
_WRITER = ThreadPoolExecutor(1, "fovea-answers")


class Bodies(Protocol):
    """Writer of one kind of complete answers: ChatBodies or CompletionBodies."""

    def complete(self, answers: Sequence[Completion]) -> dict[str, Any]: ...

    def logprobs(self, entries: Sequence[TokenLogprob], length: int) -> dict[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class _LogProbabilities:
    """The log probabilities of a choice; `shape` builds the JSON value for any part of them.

    length: of the choice's text, in characters.
    """

    entries: tuple[TokenLogprob, ...]
    length: int
    shape: Callable[[Sequence[TokenLogprob], int], dict[str, Any] | None]


async def send_answers(request: Request, bodies: Bodies, answers: Sequence[Completion]) -> None:
    """Send the complete answers to all prompts of a request."""
    characters = sum(len(text) for answer in answers for text in answer.texts)
    if sum(_count(answer) for answer in answers) <= LARGE and characters <= LONG:
        await request.reply_json(bodies.complete(answers))
        return
    pieces = await asyncio.get_running_loop().run_in_executor(_WRITER, _write, bodies, answers)
    length = sum(len(piece) for piece in pieces)
    await request.start(200, {"content-type": "application/json", "content-length": str(length)})
    for piece in pieces:
        await request.write(piece)
    await request.write(b"", more=False)


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value in pieces. Together they equal the text that `dump` returns."""
    if isinstance(value, _LogProbabilities):
        yield from _log_probabilities(value)
    elif isinstance(value, dict):
        yield "{"
        for number, (name, entry) in enumerate(value.items()):
            yield f"{',' * bool(number)}{dump(name)}:"
            yield from json_pieces(entry)
        yield "}"
    elif isinstance(value, list) and len(value) > BATCH:
        for at in range(0, len(value), BATCH):
            yield "," if at else "["
            yield dump(value[at : at + BATCH])[1:-1]
        yield "]"
    elif isinstance(value, list):
        yield "["
        for number, entry in enumerate(value):
            yield "," * bool(number)
            yield from json_pieces(entry)
        yield "]"
    else:
        yield dump(value)


def _log_probabilities(value: _LogProbabilities) -> Iterator[str]:
    """Yield the JSON text of log probabilities. Every list in it has one entry per token."""
    entries, shape, length = value.entries, value.shape, value.length
    for number, (name, first) in enumerate((shape(entries[:BATCH], length) or {}).items()):
        yield f"{',' if number else '{'}{dump(name)}:"
        if not isinstance(first, list):
            yield dump(first)
            continue
        for at in range(0, len(entries), BATCH):
            yield "," if at else "["
            yield dump((shape(entries[at : at + BATCH], length) or {})[name])[1:-1]
        yield "]"
    yield "}"


def _write(bodies: Bodies, answers: Sequence[Completion]) -> list[bytes]:
    """Write a body without its log probabilities as a whole, and these in parts."""
    plain = [replace(answer, logprobs=((),) * len(answer.logprobs)) for answer in answers]
    body = bodies.complete(plain)
    if "choices" not in body:  # an API that has its log probabilities elsewhere
        return list(_joined(bodies.complete(answers)))
    of_choices = [
        (entries, len(text))
        for answer in answers
        for entries, text in zip(answer.logprobs, answer.texts, strict=True)
    ]
    for choice, (entries, length) in zip(body["choices"], of_choices, strict=True):
        if entries:
            choice["logprobs"] = _LogProbabilities(entries, length, bodies.logprobs)
    return list(_joined(body))


def _count(answer: Completion) -> int:
    prompt = next((entry for entry in answer.prompt_logprobs if entry is not None), None)
    of_prompt = 0 if prompt is None else len(answer.prompt_logprobs) * (1 + len(prompt.top))
    return of_prompt + sum(len(entries) * (1 + len(entries[0].top)) for entries in answer.logprobs if entries)


def _joined(value: Any) -> Iterator[bytes]:
    """Yield the JSON text in pieces of about 64 KiB."""
    piece = bytearray()
    for text in json_pieces(value):
        piece += text.encode()
        if len(piece) >= _PIECE:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)
