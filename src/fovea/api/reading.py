"""How the text of an answer is divided into content, reasoning and tool calls, and how the answer ended."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fovea.core.constraints import NO_TOOLS, ToolCall, ToolUse
from fovea.core.types import Delta, FinishReason, Usage
from fovea.dialects.dialect import Dialect
from fovea.dialects.reader import AnswerReader, Piece

NO_DIALECT = Dialect()


@dataclass(slots=True)
class Answer:
    """A whole answer, divided.

    content, reasoning: texts; "" for none.
    calls: tool calls, in order.
    parts: texts and calls in the order of the answer: kind, and text or number of the call.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    parts: list[tuple[str, str | int]] = field(default_factory=list, compare=False)

    def add(self, piece: Piece) -> None:
        if piece.kind == "call":
            self.parts.append(("call", len(self.calls)))
            self.calls.append(ToolCall(piece.text, "", piece.id or new_call_id()))
            return
        if piece.kind == "arguments":
            last = self.calls[piece.index]
            self.calls[piece.index] = ToolCall(last.name, last.arguments + piece.text, last.id)
            return
        if piece.kind == "content":
            self.content += piece.text
        else:
            self.reasoning += piece.text
        kind, text = self.parts[-1] if self.parts else ("", "")
        if kind == piece.kind:
            self.parts[-1] = (kind, f"{text}{piece.text}")
        else:
            self.parts.append((piece.kind, piece.text))


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one request are read.

    dialect: of the model.
    use: the tools that were offered.
    with_reasoning: whether the client gets the reasoning.
    """

    dialect: Dialect = NO_DIALECT
    use: ToolUse = NO_TOOLS
    with_reasoning: bool = True

    def reader(self, thinking: bool) -> AnswerReader:
        """Return the reader of one answer. thinking: whether the prompt ended inside the reasoning."""
        schemas = {tool.name: tool.parameters for tool in self.use.offered}
        return AnswerReader(self.dialect, schemas or None, thinking=thinking)

    def divide(self, text: str, thinking: bool) -> Answer:
        """Divide a whole answer."""
        reader, answer = self.reader(thinking), Answer()
        for piece in self.wanted([*reader.push(text), *reader.finish()]):
            answer.add(piece)
        return answer

    def wanted(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that the client gets."""
        return [piece for piece in pieces if self.with_reasoning or piece.kind != "reasoning"]


class Readers:
    """The readers of all choices of one request while they are streamed."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}

    def read(self, delta: Delta) -> list[Piece]:
        """Return the pieces that are certain with a delta."""
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._reading.reader(delta.thinking)
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        return self._reading.wanted(pieces)

    def has_calls(self, index: int) -> bool:
        """Whether a choice has made a tool call."""
        return index in self._readers and self._readers[index].calls > 0


def finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    """OpenAI's reason for the end of an answer. One that ends with calls waits for their results."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def new_call_id() -> str:
    """A new id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer.

    reason: finish reason of the choice, such as "stop", "length" or "content_filter"; None: none was named.
    stop: the stop string or the token that ended the answer; None: another end.
    usage: token counts; None: unknown.
    extension: the `fovea` field of the answer; None: there is none.
    """

    reason: str | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    extension: dict[str, Any] | None = None


NewId = Callable[[str], str]
"""Returns a new id. Its argument is the prefix that tells the kind, such as "msg"."""


def new_id(kind: str) -> str:
    """A new random id."""
    return f"{kind}_{uuid.uuid4().hex}"
