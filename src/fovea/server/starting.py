"""An engine client from before there is an engine.

Loading a model takes seconds to minutes. The port is open meanwhile: /health answers, /ready and requests say 503 with
"still loading", so that probes and clients can tell a slow start from a dead process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping

from fovea.core.errors import Unavailable
from fovea.core.protocols import CacheStage, EngineClient, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt

log = logging.getLogger("fovea.server")


class StartingClient:
    """Calls `load` in a thread once `start` is called, and is that engine from then on.

    name: what the model will be served as. failed: called, from that thread, when loading fails; see `failure`.
    """

    def __init__(self, name: str, load: Callable[[], EngineClient], failed: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._load = load
        self._failed = failed
        self._engine: EngineClient | None = None
        self._thread = threading.Thread(target=self._run, name="fovea-loading", daemon=True)
        self._info = ModelInfo(name, "loading", 0, "unknown", "unknown", 0, 0, int(time.time()))

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._engine = self._load()
        except Exception as error:  # noqa: BLE001 - handed to whoever started the server
            self.failure = error
            self._failed()

    @property
    def info(self) -> ModelInfo:
        return self._engine.info if self._engine else self._info

    @property
    def status(self) -> EngineStatus:
        if self._engine is not None:
            return self._engine.status
        return "loading" if self.failure is None else "stopped"

    def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        return self._loaded().stream(request)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        self._loaded().check_room(choices, reserved)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await self._loaded().tokenize(prompt)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats() if self._engine else {}

    def clear_caches(self, *stages: CacheStage) -> None:
        self._loaded().clear_caches(*stages)

    async def close(self, drain_s: float = 0.0) -> None:
        """A load in progress is left behind: its thread ends with the process."""
        if self._engine is not None:
            await self._engine.close(drain_s)

    def _loaded(self) -> EngineClient:
        if self._engine is None:
            raise Unavailable("the model is still loading")
        return self._engine
