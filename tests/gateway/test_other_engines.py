"""The gateway in front of engines that are not Fovea: what they send was recorded from vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from fovea.api.cutter import Cutter
from fovea.core.errors import FoveaError
from fovea.gateway.backends.backend import VISION, Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.backends.watch import Watch
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.generate.dispatch import Dispatcher, Job
from fovea.gateway.generate.outgoing import Renderer
from fovea.gateway.generate.upstream import AttemptFailed, Outgoing
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import media_parts
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.metrics import Metrics
from fovea.gateway.settings import ResilienceSettings, RouteSettings
from fovea.gateway.translate.chat_reader import usage_of
from fovea.gateway.usage.prices import Consumption, consumption_of

MODEL = ModelConfig("m")
LISTS = {
    "fovea": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "fovea"}]},
    "vllm": {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "root": "m", "parent": None}]},
    "llama.cpp": {"models": [{"name": "m"}], "data": [{"id": "m", "owned_by": "llamacpp", "aliases": ["m"]}]},
    "others": {"data": [{"id": "m"}]},
}
"""Answers of engines at /v1/models."""


def body(url: str) -> Body:
    """A question about one image."""
    content = [{"type": "image_url", "image_url": {"url": url}}]
    cutter = Cutter()
    cutter.feed(json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode())
    return Body.parse(cutter)


def fleet(config: BackendConfig, settings: ResilienceSettings) -> tuple[Fleet, Backend]:
    backends = Fleet(settings)
    backends.configure([MODEL])
    backends.update([config], 0.0)
    return backends, next(iter(backends))


def asked_for_models(config: BackendConfig, engine: str) -> Backend:
    """The backend after its first check."""

    async def get(url: str, key: str, timeout_s: float) -> tuple[int, bytes]:
        return (200, json.dumps(LISTS[engine]).encode()) if url.endswith("/v1/models") else (200, b"{}")

    settings = ResilienceSettings()
    backends, backend = fleet(config, settings)
    watch = Watch(backends, get, settings, lambda: 0.0, lambda: None, lambda _: None)
    asyncio.run(watch.check(backend))
    return backend


def sent_under_load(backend: Backend) -> dict[str, Any]:
    renderer = Renderer(body("data:image/png;base64,AAAA"), "chat", {}, "id")
    renderer.degraded = "medium"
    sent: dict[str, Any] = json.loads(b"".join(renderer(backend, MODEL).pieces))
    return sent


@pytest.mark.parametrize("engine", LISTS)
def test_only_fovea_is_asked_for_lower_levels_unless_configured(engine: str) -> None:
    """vLLM refuses `"detail": "medium"` with 400, so images would fail just when there are many."""
    backend = asked_for_models(BackendConfig("http://a:1"), engine)
    part = sent_under_load(backend)["messages"][0]["content"][0]["image_url"]
    assert part.get("detail") == ("medium" if engine == "fovea" else None)
    assert backend.degrade == ("detail" if engine == "fovea" else "off")


def test_configured_way_holds_for_any_engine() -> None:
    backend = asked_for_models(BackendConfig("http://a:1", degrade="max-pixels"), "vllm")
    assert sent_under_load(backend)["mm_processor_kwargs"] == {"max_pixels": 512 * 512}
    assert asked_for_models(BackendConfig("http://a:1", degrade="off"), "fovea").degrade == "off"


VLLM = {"cached_tokens": 128, "created_cache_tokens": 0, "multimodal_tokens": {"image": 117}}
DETAILS: dict[str, tuple[dict[str, Any] | None, int, int]] = {
    "vllm": (VLLM, 128, 117),
    "vllm, video": ({"cached_tokens": None, "multimodal_tokens": {"image": 10, "video": 30}}, 0, 40),
    "vllm, text": ({"cached_tokens": 3, "multimodal_tokens": None}, 3, 64),
    "vllm without --enable-prompt-tokens-details": (None, 0, 64),
    "llama.cpp": ({"cached_tokens": 135}, 135, 64),
    "fovea": ({"cached_tokens": 5, "image_tokens": 100}, 5, 100),
    "wrong": ({"cached_tokens": "1", "multimodal_tokens": {"image": -1}}, 0, 64),
}
"""prompt_tokens_details of engines, and the cached and visual tokens; 64 are the estimate."""


@pytest.mark.parametrize("name", DETAILS)
def test_details_of_usage(name: str) -> None:
    details, cached, visual = DETAILS[name]
    usage = {"prompt_tokens": 136, "completion_tokens": 12, "prompt_tokens_details": details}
    estimate = Consumption(visual_tokens=64, images=1)
    assert consumption_of(usage, estimate) == Consumption(136, visual, cached, 12, 1)
    translated = usage_of(usage)
    assert (translated.cached, translated.image) == (cached, 0 if visual == 64 else visual)


class Failing:
    """A backend that answers 500 to everything."""

    async def open(self, backend: Backend, outgoing: Outgoing, *, stream: bool, deadline: float) -> Any:
        raise AttemptFailed("the backend answered 500", "status", status=500)


def fail(url: str, name: bytes, settings: ResilienceSettings) -> Backend:
    """A backend that has failed on one image as often as would open its breaker."""
    given = body(url)
    images: Sequence[RequestImage] = [
        RequestImage("", name, 0, 0, False, part) for part in media_parts(given.value)
    ]
    backends, backend = fleet(BackendConfig("http://a:1", models=("m",)), settings)
    router = Router(backends, RouteSettings(), lambda: 0.0)
    dispatcher = Dispatcher(router, Failing(), settings, lambda: 0.0, Metrics())  # type: ignore[arg-type]

    async def send() -> None:
        deadline = asyncio.get_running_loop().time() + 60
        demand = Demand(given, list(images))
        outgoing = Outgoing("/v1/chat/completions", (b"{}",), {})
        for _ in range(settings.breaker_failures):
            job = Job(demand, [MODEL], lambda *_: outgoing, lambda _: Load(1, 1), deadline)
            with pytest.raises(FoveaError):
                await dispatcher.send(job)

    asyncio.run(send())
    return backend


def test_a_link_that_leads_nowhere_opens_no_breaker() -> None:
    """vLLM and llama.cpp answer 500 to it, and a client can send as many as it likes."""
    settings = ResilienceSettings()
    backend = fail("https://example.com/gone.png", b"name of the link", settings)
    assert backend.breakers[VISION].allows(0.0)
    broken = fail("data:image/png;base64,AAAA", b"", settings)
    assert not broken.breakers[VISION].allows(0.0)
