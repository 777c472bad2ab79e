"""The seams: what one floor may ask of another without knowing who answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, Protocol

from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt

EngineStatus = Literal["loading", "ready", "stopped"]
CacheStage = Literal["kv", "pixels", "encoder", "regions", "host", "disk"]
CACHE_STAGES: tuple[CacheStage, ...] = ("kv", "pixels", "encoder", "regions", "host", "disk")


class Tokenizer(Protocol):
    """Text to ids and back. `decode` may end in half a character; `engine.detokenize` hides that."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class EngineClient(Protocol):
    """All that a server, gateway or benchmark knows of an engine, be it local, remote or simulated."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def status(self) -> EngineStatus:
        """Requests are taken only when "ready"."""
        ...

    def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        """Deltas of all choices, interleaved. Closing the iterator cancels the request and frees what it held.

        Raises RequestError before the first delta for what is wrong with the request, EngineError for a defect.
        """
        ...

    def check_room(self, choices: int, reserved: int = 0) -> None:
        """Whether a request of that many answers would be taken now, before its images are fetched for nothing.

        reserved: answers promised to others, whose images are still on their way.
        Raises Overloaded or Unavailable, or InvalidRequest when it never would.
        """
        ...

    async def tokenize(self, prompt: Prompt) -> list[int]: ...

    def stats(self) -> Mapping[str, float]:
        """Gauges and running totals by the names of `observe.table`."""
        ...

    def clear_caches(self, *stages: CacheStage) -> None:
        """Forget what these stages keep, all where none is named; what is in use stays until it is let go.

        Waits for the end of a step, so it belongs into a thread.
        """
        ...

    async def close(self, drain_s: float = 0.0) -> None:
        """Finish running requests within `drain_s` seconds, abort the rest, stop."""
        ...
