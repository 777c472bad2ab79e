"""The interface of the writers of answers, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fovea.api.reading import Answer, Ending, NewId
from fovea.core.types import Usage
from fovea.dialects.reader import Piece

Event = dict[str, Any]


class Writer(Protocol):
    """Writer of an answer in the form of one API: MessagesWriter or ResponsesWriter."""

    model: str

    def complete(self, answer: Answer, ending: Ending, logprobs: Sequence[Any] = ()) -> Event: ...

    def begin(self, usage: Usage | None = None) -> list[Event]: ...

    def pieces(self, pieces: Sequence[Piece], logprobs: Sequence[Any] = ()) -> list[Event]: ...

    def end(self, ending: Ending) -> list[Event]: ...

    def failure(self, fields: dict[str, Any]) -> Event: ...

    def event(self, payload: Event) -> bytes: ...


MakeWriter = Callable[[str, int, NewId], Writer]
"""Returns a writer for a model's name, a Unix time in seconds, and a maker of ids."""
