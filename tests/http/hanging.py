"""An engine that hangs, apart from other helpers, so that a process that imports only this starts soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fovea.core.errors import EngineError
from fovea.core.types import Delta, GenerationRequest
from tests.server.scripted import Script

FOR_EVER_S = 60.0


class Hanging(Script):
    """An engine that sends one delta of each answer and then nothing, or that dies.

    dies_after_s: seconds after the first delta; None: it lives.
    """

    dies_after_s: float | None = None

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            if request.sampling.max_tokens != 1:
                yield Delta(0, "so", (1,))
            await asyncio.sleep(FOR_EVER_S if self.dies_after_s is None else self.dies_after_s)
            self.status = "stopped"
            raise EngineError("the device is lost")
        finally:
            self.closed_streams += 1
