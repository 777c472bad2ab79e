"""Everything that the requests of one worker share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fovea.gateway.backends.backend import Backend
from fovea.gateway.backends.fleet import Drains, Fleet
from fovea.gateway.cache.cache import ResponseCache
from fovea.gateway.experiments.experiments import Experiments
from fovea.gateway.generate.dispatch import Dispatcher
from fovea.gateway.generate.experiment import Shadows
from fovea.gateway.generate.records import Book, Tracking
from fovea.gateway.generate.relay import SilenceWatch
from fovea.gateway.generate.upstream import AttemptFailed, Upstream
from fovea.gateway.inspect.demand import VisualCounter
from fovea.gateway.inspect.images import ImageInspector, KnownImages, RequestImage
from fovea.gateway.metrics import Metrics
from fovea.gateway.queues import Queues
from fovea.gateway.settings import GatewaySettings
from fovea.gateway.tenants.accounts import Accounts
from fovea.gateway.tenants.keys import Tenants
from fovea.gateway.usage.prices import PriceTable
from fovea.http.bodies import BodyBudget
from fovea.http.browsers import Browsers

if TYPE_CHECKING:
    from fovea.gateway.generate.request import Request

log = logging.getLogger("fovea.gateway")
IMAGES = "x-fovea-images"
"""Header of an engine's answer with the identities of the request's images, separated by commas."""
IDENTITY_DIGITS = 64


class LoggedMetrics:
    """Counts and logs what happens to attempts; the `Observer` of a dispatcher."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def attempt_failed(self, backend: Backend, failure: AttemptFailed) -> None:
        self._metrics.count("attempts", backend.name, failure.reason)
        log.warning("%s: %s", failure.request_id, failure.message)

    def breaker_opened(self, backend: Backend, stage: str) -> None:
        self._metrics.count("breaker_opened", backend.name, stage)
        log.error("backend %s: the circuit breaker of %s has opened", backend.name, stage)

    def retried(self, kind: str) -> None:
        self._metrics.count("retries", kind)


@dataclass(slots=True)
class Services:
    """The parts of one worker. None: the gateway has no such part.

    running: requests for answers that have not ended.
    draining: whether the gateway is shutting down.
    """

    settings: GatewaySettings
    clock: Callable[[], float]
    metrics: Metrics
    fleet: Fleet
    upstream: Upstream
    dispatcher: Dispatcher
    inspector: ImageInspector
    known: KnownImages
    visual: VisualCounter
    queues: Queues
    bodies: BodyBudget
    browsers: Browsers
    tenants: Tenants
    accounts: Accounts
    prices: PriceTable | None
    cache: ResponseCache | None
    experiments: Experiments | None
    shadows: Shadows
    book: Book
    drains: Drains
    silence: SilenceWatch
    tracking: Tracking
    running: set[Request] = field(default_factory=set)
    draining: bool = False

    def learn(self, headers: Sequence[tuple[str, str]], images: Sequence[RequestImage]) -> None:
        """Learn the identities of images behind URLs from the headers of an engine's answer."""
        if not any(image.name for image in images):
            return
        told = next((value for name, value in headers if name == IMAGES), "").split(",")
        pictures = [image for image in images if not image.is_video]
        for image, identity in zip(pictures, told, strict=False):
            if (
                image.name
                and len(identity) == IDENTITY_DIGITS
                and not set(identity) - set("0123456789abcdef")
            ):
                self.known.learn(image.name, identity)
