"""Reads an answer while it is written: what of its text is content, reasoning, and tool calls.

One machine with a cursor serves all dialects. Each state is a method that consumes text from the cursor on
and returns whether it could decide anything. A state decides only what later text cannot change, so the
pieces are the same, joined, in whatever chunks the text arrives.

White space beside reasoning and beside calls belongs to neither and is dropped. What turns out not to be a
call before its name is read, and a call of a tool that was not offered, stays content. Once a name was passed
on, the call stays a call; if the rest of it is wrong, the text from the error on is content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fovea.dialects.calls import (
    SPACE,
    ArgumentsText,
    CallName,
    End,
    Event,
    JsonCall,
    Malformed,
    PythonCalls,
    XmlCall,
)
from fovea.dialects.dialect import Dialect, ToolFormat

Kind = Literal["content", "reasoning", "call", "arguments"]
Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of the parameters of each tool, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer.

    kind: content; reasoning; call, which begins a call of the tool `text`; or arguments, the next part of the
        JSON text of that call's arguments.
    index: number of the call, from 0.
    id: names a call that has a name already; "": it gets a new one.
    """

    kind: Kind
    text: str
    index: int = 0
    id: str = ""


class AnswerReader:
    """The reader of one answer.

    calls: number of tool calls so far.
    """

    def __init__(self, dialect: Dialect, tools: Schemas | None = None, *, thinking: bool = False) -> None:
        """tools: those that were offered; None: calls are not looked for.

        thinking: whether the prompt ended inside the model's reasoning.
        """
        self.calls = 0
        self._format = dialect.tools if tools else None
        self._tools = tools or {}
        self._marks = dialect.reasoning
        self._text = ""
        self._at = 0
        self._final = False
        self._found: list[tuple[Kind, int, list[str]]] = []
        self._parser: JsonCall | PythonCalls | XmlCall | None = None
        self._trims = thinking  # white space that comes next is dropped
        self._fresh = True  # nothing of the content was emitted, so that a call may begin without a mark
        self._source = 0  # where the text of the current call began
        self._known = False  # whether the current call was announced
        self._state: Callable[[], bool] = self._reasoning if thinking and self._marks else self._begin

    @property
    def thinking(self) -> bool:
        """Whether the text that comes next is reasoning, as far as it can be told."""
        return self._state == self._reasoning

    def push(self, text: str) -> list[Piece]:
        """Read more text. Returns the pieces that are certain now."""
        self._text = self._text[self._keep_from() :] + text
        return self._run()

    def finish(self) -> list[Piece]:
        """Read the end of the answer. Returns all that was held back."""
        self._final = True
        return self._run()

    def _keep_from(self) -> int:
        """Drop the text that was read, except that of a call that may turn out not to be one."""
        keep = self._at if self._state != self._call or self._known else self._source
        self._at -= keep
        self._source -= keep
        return keep

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        found, self._found = self._found, []
        return [Piece(kind, "".join(texts), index) for kind, index, texts in found]

    def _begin(self) -> bool:
        """The beginning of the answer: reasoning, or anything else."""
        rest = self._text[self._at :].lstrip(SPACE)
        if self._marks is not None:
            mark = self._marks[0]
            if not self._final and (not rest or (mark.startswith(rest) and rest != mark)):
                return False
            if rest.startswith(mark):
                self._at = len(self._text) - len(rest) + len(mark)
                self._trims, self._state = True, self._reasoning
                return True
        self._state = self._content
        return True

    def _reasoning(self) -> bool:
        assert self._marks is not None
        found = self._emit_until("reasoning", self._marks[1])
        if found:
            self._trims, self._state = True, self._content
        return found

    def _content(self) -> bool:
        """Text outside of reasoning and calls, up to where a call begins."""
        form = self._format
        if form is None:
            return self._emit_until("content", None)
        if form.bare and self._fresh:
            rest = self._text[self._at :].lstrip(SPACE)
            if not rest and not self._final:
                return False
            if rest.startswith("{" if form.notation == "json" else "["):
                self._source, self._at = self._at, len(self._text) - len(rest)
                return self._enter(form)
        return self._emit_until("content", form.begin) and self._enter(form)

    def _enter(self, form: ToolFormat) -> bool:
        """Begin to read a call. Its text begins at `_source`, with the mark."""
        self._known = False
        if form.notation == "json":
            self._parser = JsonCall(form.arguments)
        elif form.notation == "python":
            self._parser = PythonCalls()
        else:
            self._parser = XmlCall(self._tools)
        self._state = self._call
        return True

    def _call(self) -> bool:
        """The text of a call, character by character."""
        assert self._parser is not None
        while self._at < len(self._text):
            try:
                events = list(self._parser.feed(self._text[self._at]))
            except (Malformed, RecursionError):
                return self._leave_as_content()
            for event in events:
                if isinstance(event, CallName) and event.name not in self._tools:
                    return self._leave_as_content(event.name)
                self._take(event)
            self._at += 1
            if events and isinstance(events[-1], End):
                self._state = self._after
                return True
        return self._leave_as_content() if self._final and not self._known else False

    def _take(self, event: Event) -> None:
        if isinstance(event, CallName):
            self._known = True
            self._emit("call", event.name, self.calls)
            self.calls += 1
        elif isinstance(event, ArgumentsText):
            self._emit("arguments", event.text, self.calls - 1)

    def _leave_as_content(self, read: str = "") -> bool:
        """Turn what looked like a call into content, as far as it was not passed on.

        read: name that was read after the last call was passed on.
        """
        self._emit("content", read if self._known else self._text[self._source : self._at])
        self._fresh = False
        self._trims, self._state = False, self._content
        return True

    def _after(self) -> bool:
        """Read what comes between calls: the end mark, or the text between two calls without marks."""
        assert self._format is not None
        rest = self._text[self._at :].lstrip(SPACE + ";" if self._format.bare else SPACE)
        end = self._format.end
        if not self._final and (not rest or (end.startswith(rest) and rest != end)):
            return False
        self._at = len(self._text) - len(rest)
        if end and rest.startswith(end):
            self._at += len(end)
        self._trims, self._fresh, self._state = True, True, self._content
        return True

    def _emit_until(self, kind: Literal["content", "reasoning"], mark: str | None) -> bool:
        """Emit text up to a mark, and continue after it. Returns whether there was one.

        mark: text to stop at; None: emit everything. With a mark, trailing white space and what may be the
        beginning of the mark are held back until more text arrives.
        """
        if self._trims:
            self._at = len(self._text) - len(self._text[self._at :].lstrip(SPACE))
            if self._at == len(self._text):
                return False
            self._trims = False
        place = -1 if mark is None else self._text.find(mark, self._at)
        stop = len(self._text) if place < 0 else place
        if mark is not None and place < 0 and not self._final:
            stop -= _overlap(self._text, self._at, mark)
        if place >= 0 or (mark is not None and not self._final):
            stop = self._at + len(self._text[self._at : stop].rstrip(SPACE))
        self._emit(kind, self._text[self._at : stop])
        self._source = self._at = stop
        if mark is not None and place >= 0:
            self._at = place + len(mark)
        return place >= 0

    def _emit(self, kind: Kind, text: str, index: int = 0) -> None:
        if not text:
            return
        if kind == "content":
            self._fresh = False
        if self._found and kind != "call" and self._found[-1][:2] == (kind, index):
            self._found[-1][2].append(text)
        else:
            self._found.append((kind, index, [text]))


def _overlap(text: str, start: int, mark: str) -> int:
    """Length of the end of a text, from `start` on, with which a mark begins."""
    for length in range(min(len(text) - start, len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
