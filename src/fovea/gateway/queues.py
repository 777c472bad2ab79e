"""A fair queue for each model: requests wait there while the backends of the model are full."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.config import ModelConfig
from fovea.gateway.queue.settings import QueueSettings
from fovea.gateway.queue.turns import TurnQueue
from fovea.gateway.settings import RouteSettings

ENDLESS = 1 << 60
"""A capacity without a limit."""
LOW_AT = 1.0
"""Part of the capacity in use from which images are asked for at the lowest level."""


class Queues:
    """The queues of one worker. A worker's share of a backend is the same as that of every other worker.

    workers: processes that send to the same backends.
    """

    def __init__(
        self,
        fleet: Fleet,
        route: RouteSettings,
        settings: QueueSettings,
        workers: int,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._route = route
        self._settings = settings
        self._workers = workers
        self._clock = clock
        self._queues: dict[str, TurnQueue] = {}

    def __iter__(self) -> Iterator[tuple[str, TurnQueue]]:
        return iter(self._queues.items())

    def of(self, model: ModelConfig) -> TurnQueue:
        """Return the queue of a model."""
        queue = self._queues.get(model.name)
        if queue is None:
            tokens, requests = self._capacity(model)
            queue = TurnQueue(self._settings, tokens, requests, self._clock)
            self._queues[model.name] = queue
        return queue

    def resize(self) -> None:
        """Fit all queues to the backends that there are now. Queues of models that are gone are dropped."""
        known = {model.name: model for model in self._fleet.models()}
        for name, queue in list(self._queues.items()):
            if name in known:
                queue.resize(*self._capacity(known[name]))
            elif not queue.queue.waiting and not queue.queue.running:
                del self._queues[name]

    def degrade(self, model: ModelConfig) -> str:
        """Return the detail level to which images are lowered under the load of a model; "": not lowered."""
        at = self._route.degrade_at
        queue = self.of(model).queue
        tokens, requests = queue.capacity
        used = max(queue.running_tokens / max(1, tokens), queue.running / max(1, requests))
        if not at or used < at:
            return ""
        return "low" if queue.waiting or used >= LOW_AT else "medium"

    def _capacity(self, model: ModelConfig) -> tuple[int, int]:
        """Tokens and requests that the backends of a model may have outstanding from this worker.

        Backends that accept nothing now count, too: a model without any backend must answer with their
        reasons at once, not after a wait.
        """
        tokens = requests = 0
        for backend in self._fleet.serving(model):
            tokens += backend.config.max_tokens or self._route.tokens_per_backend or ENDLESS
            requests += backend.config.max_requests or self._route.requests_per_backend or ENDLESS
        share = self._workers
        return min(ENDLESS, -(-tokens // share)) or ENDLESS, min(ENDLESS, -(-requests // share)) or ENDLESS
