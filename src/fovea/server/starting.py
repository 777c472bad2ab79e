"""An engine client that can be used while its engine is still loading.

Loading a model takes seconds to minutes. The port is already open during this time: /health answers with 200,
/ready and requests with 503 and "still loading". Probes and clients can therefore tell a slow start from a
dead process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fovea.core.errors import Unavailable
from fovea.core.protocols import CacheStage, EngineClient, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered
from fovea.server.run import keep_for_life

log = logging.getLogger("fovea.server")


class StartingClient:
    """Loads an engine in a thread after `start`, and passes every call on to it once it is loaded.

    name: the name of the served model.
    load: creates the engine.
    on_failure: called in that thread if loading fails.
    on_ready: called in that thread once the engine is loaded.
    failure: the error with which loading failed, or None.

    Until the engine is loaded, calls that need it raise Unavailable.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], EngineClient],
        on_failure: Callable[[], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: Exception | None = None
        self._load = load
        self._on_failure = on_failure
        self._on_ready = on_ready
        self._engine: EngineClient | None = None
        self._thread = threading.Thread(target=self._run, name="fovea-loading", daemon=True)
        self._info = ModelInfo(name, "loading", 0, "unknown", "unknown", 0, 0, int(time.time()))

    def start(self) -> None:
        """Start to load the engine."""
        self._thread.start()

    def _run(self) -> None:
        try:
            engine = self._load()
            keep_for_life()
            self._engine = engine
        except Exception as error:  # noqa: BLE001 - the code that started the server raises it again
            self.failure = error
            self._on_failure()
        else:
            self._on_ready()

    @property
    def info(self) -> ModelInfo:
        return self._engine.info if self._engine else self._info

    @property
    def status(self) -> EngineStatus:
        if self._engine is not None:
            return self._engine.status
        return "loading" if self.failure is None else "stopped"

    def stream(self, request: GenerationRequest, /) -> AsyncIterator[Delta]:
        return self._require_engine().stream(request)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        self._require_engine().check_room(choices, reserved)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await self._require_engine().tokenize(prompt)

    async def render(self, request: GenerationRequest, /) -> Rendered:
        return await self._require_engine().render(request)

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._require_engine().detokenize(ids)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats() if self._engine else {}

    async def release_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        await self._require_engine().release_offers(offers)

    def clear_caches(self, *stages: CacheStage) -> None:
        self._require_engine().clear_caches(*stages)

    async def close(self, drain_s: float = 0.0) -> None:
        """Close the engine if it is loaded.

        A load in progress is not stopped: its thread ends with the process.
        """
        if self._engine is not None:
            await self._engine.close(drain_s)

    def _require_engine(self) -> EngineClient:
        if self._engine is None:
            raise Unavailable("the model is still loading")
        return self._engine
