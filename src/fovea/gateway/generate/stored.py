"""The response cache as one request uses it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from fovea.gateway.cache.cache import ResponseCache
from fovea.gateway.cache.hit import Hit
from fovea.gateway.cache.key import MEDIA_MARK
from fovea.gateway.cache.plan import Plan
from fovea.gateway.config import ModelConfig
from fovea.gateway.exchange import Exchange
from fovea.gateway.generate.relay import Recorder
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.tenants.keys import Tenant

WISH = b"x-fovea-cache"
"""Header of a request: "on" caches its answer although it is not deterministic."""


class NoRecorder:
    """Records nothing: the answer is not for the cache."""

    active = False

    def feed(self, data: bytes, /) -> None:
        """Take bytes."""

    def finish(self, status: int, /) -> None:
        """Take the end."""


_NO_RECORDER = nullcontext(NoRecorder())


class Stored:
    """Finds and keeps the answer to one request.

    result: "hit", "miss", "stale", "bypass", or "" if the cache has no part in this request.
    """

    __slots__ = ("_cache", "_leads", "_plan", "result")

    def __init__(self) -> None:
        self._cache: ResponseCache | None = None
        self._plan: Plan | None = None
        self._leads = True
        self.result = ""

    async def find(
        self,
        cache: ResponseCache,
        exchange: Exchange,
        tenant: Tenant,
        model: ModelConfig,
        body: Body,
        images: Sequence[RequestImage],
        path: str,
        *,
        every: bool,
    ) -> Hit | None:
        """Return the stored answer to a request, or None.

        body: of the chat request. path: of its API. every: cache answers that are not deterministic, too.

        An image that only its engine has read has no identity for the cache: what is behind its URL may have
        changed since.
        """
        asked = every or exchange.header(WISH).lower() == "on"
        value = body.value
        if asked or value.get("temperature") == 0:  # others are not cached, so their texts are not needed
            value = body.resolved({image.part.url: f"{MEDIA_MARK}{n}" for n, image in enumerate(images)})
        self._cache = cache
        self._plan = plan = cache.plan(
            value,
            [image.identity if not image.name else "" for image in images],
            tenant=tenant.scope,
            model_version=f"{model.served or model.name}\n{model.version}",
            path=path,
            cache_control=exchange.header(b"cache-control") or None,
            asked=asked,
        )
        if not plan.key:
            self.result = "bypass"
            return None
        hit = await cache.lookup(plan)
        self.result = "miss" if hit is None else "hit"
        return hit

    async def stale(self) -> Hit | None:
        """Return an older answer to the request, or None."""
        if self._cache is None or self._plan is None:
            return None
        hit = await self._cache.stale(self._plan)
        if hit is not None:
            self.result = "stale"
        return hit

    def record(self, *, wanted: bool) -> AbstractContextManager[Recorder]:
        """Return the recorder of a backend's answer. wanted: whether the wanted model answers."""
        if self._cache is None or self._plan is None or not self._plan.key or not wanted:
            return cast("AbstractContextManager[Recorder]", _NO_RECORDER)
        self._leads = False  # from here on the recorder passes the lead on, once the answer is stored
        return cast("AbstractContextManager[Recorder]", self._cache.record(self._plan))

    def end(self) -> None:
        """Let another request lead those that wait for the same answer. It may be called in any case."""
        if self._cache is not None and self._plan is not None and self._leads:
            self._cache.abandon(self._plan)
