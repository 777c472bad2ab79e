"""An engine client whose running answers can be ended with an error, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from fovea.core.errors import Unavailable
from fovea.core.protocols import CacheStage, EngineClient, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt


class OpenAnswers:
    """Passes every call on to an engine, and remembers who waits for its next delta.

    engine: the engine.
    cut_reason: why all answers were ended; None: they were not.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.cut_reason: str | None = None
        self._waiting: set[asyncio.Timeout] = set()

    def cut(self, reason: str) -> None:
        """End all answers with Unavailable, and refuse new ones. Call it in the server's event loop.

        Streams send the error as their last event; other requests get it as their answer.
        """
        self.cut_reason = reason
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            waiting.reschedule(now)

    async def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        deltas = self.engine.stream(request)
        try:
            while True:
                yield await self._next(deltas)
        except StopAsyncIteration:
            return
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    async def _next(self, deltas: AsyncIterator[Delta]) -> Delta:
        if self.cut_reason is not None:
            raise Unavailable(self.cut_reason)
        waiting = asyncio.timeout(None)
        try:
            async with waiting:
                self._waiting.add(waiting)
                return await anext(deltas)
        except TimeoutError:
            if self.cut_reason is None:
                raise
            raise Unavailable(self.cut_reason) from None
        finally:
            self._waiting.discard(waiting)

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def status(self) -> EngineStatus:
        return self.engine.status

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self.cut_reason is not None:
            raise Unavailable(self.cut_reason)
        self.engine.check_room(choices, reserved)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await self.engine.tokenize(prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self.engine.detokenize(ids)

    def stats(self) -> Mapping[str, float]:
        return self.engine.stats()

    def clear_caches(self, *stages: CacheStage) -> None:
        self.engine.clear_caches(*stages)

    async def close(self, drain_s: float = 0.0) -> None:
        await self.engine.close(0.0 if self.cut_reason is not None else drain_s)
