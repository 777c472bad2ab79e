"""An engine without a model. It yields the deltas and errors that a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from fovea.core.protocols import CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered, StageTimings, Usage


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

    async def render(self, request: GenerationRequest) -> Rendered:
        return Rendered([1, 2], (), 16)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return "a" * len(ids)

    def stats(self) -> Mapping[str, float]:
        return {}

    def clear_caches(self, *stages: CacheStage) -> None:
        return None

    async def close(self, drain_s: float = 0.0) -> None:
        return None


ANSWER = (
    "<think>\nhm\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"code": "A1"}}\n</tool_call>'
)


def talker(text: str, *, thinking: bool = False) -> Script:
    """An engine of a model that reasons and calls tools, whose answer comes letter by letter."""
    deltas = [Delta(0, letter, (1,), thinking=thinking) for letter in text]
    usage, timings = Usage(5, len(text)), StageTimings()
    engine = Script(
        *deltas, Delta(0, "", (), finish_reason="stop", usage=usage, timings=timings, thinking=thinking)
    )
    engine.info = replace(engine.info, tool_format="hermes", reasons=True)
    return engine
