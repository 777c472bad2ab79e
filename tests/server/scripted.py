"""An engine without a model. It yields the deltas and errors that a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt


class Script:
    """An EngineClient that yields the given deltas and raises the given errors, in order.

    closed_streams: number of streams that ended, with or without success.
    """

    def __init__(self, *steps: Delta | Exception, status: EngineStatus = "ready") -> None:
        self.info = ModelInfo("script", "none", 1, "float32", "cpu", 64, 16, 0)
        self.status = status
        self.closed_streams = 0
        self._steps = steps

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed_streams += 1

    def check_room(self, choices: int, reserved: int = 0) -> None:
        return None

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return [1, 2]

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "a" * len(ids)

    def stats(self) -> Mapping[str, float]:
        return {}

    def clear_caches(self, *stages: CacheStage) -> None:
        return None

    async def close(self, drain_s: float = 0.0) -> None:
        return None
