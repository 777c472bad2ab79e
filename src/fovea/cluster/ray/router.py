"""The router of Ray Serve's own proxy: replicas in the order of a request's key, as the gateway orders them.

HAProxy does not use it: it hashes the same header itself (`ingress.py`). Ray Serve gives routers the value of
one header, which `ingress.environment` names, so no body is read.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.request_router.request_router import RequestRouter

from fovea.cluster.ray.ingress import ranked

BALANCE = 2.0


class KeyRouter(RequestRouter):
    """Sends the requests of a key to the same replica, unless it is too busy."""

    def initialize_state(self, balance: float = BALANCE) -> None:
        """balance: see `Ingress.balance`."""
        self._balance = balance

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Return lists of replicas, each asked only if none of the list before accepts the request."""
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(one.replica_id) or 0 for name, one in by_name.items()}
        key = pending_request.metadata.session_id if pending_request is not None else ""
        return [[by_name[name]] for name in ranked(key or "", loads, self._balance)]
