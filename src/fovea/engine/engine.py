"""The engine as its users see it: load a checkpoint, ask about images, get text.

    engine = Engine.from_pretrained("fovea-tiny")
    print(engine.generate("What is in the picture?", images=["photo.png"], temperature=0).text)

    async for delta in engine.stream("Describe it.", images=["photo.png"]):
        print(delta.text, end="")

It is also the `EngineClient` that a server runs over. Preparing a request (template, tokens, pixels) happens in worker
threads; everything that touches the model happens in the loop's thread.
"""

from __future__ import annotations

import asyncio
import queue
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from fovea.core.answer import AnswerBuilder
from fovea.core.errors import InvalidRequest, Unavailable
from fovea.core.image import PixelBudget
from fovea.core.protocols import CACHE_STAGES, CacheStage, EngineStatus
from fovea.core.sampling import SamplingParams
from fovea.core.types import Completion, Delta, GenerationRequest, ModelInfo, Prompt
from fovea.core.video import VideoBudget
from fovea.engine.assemble import assemble
from fovea.engine.config import EngineConfig
from fovea.engine.intake import Visit, walk, walk_async
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.request.inputs import to_prompt
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.waiting import shared
from fovea.engine.stats import engine_stats
from fovea.engine.step.events import Event, Sink
from fovea.engine.visual_budget.detail import DetailPolicy

PREPARE_THREADS = 4


class Engine:
    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        detail_policy: DetailPolicy | None = None,
    ) -> None:
        """detail_policy: one of your own in place of the configuration's."""
        self.config = config or EngineConfig()
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        parts = assemble(loaded, self.config, detail_policy)
        self.tokenizer = loaded.tokenizer
        self.scheduler, self.loop = parts.scheduler, parts.loop
        self._info = parts.info
        self._regions = parts.regions
        self._embeddings, self._slower, self._kv = parts.embeddings, parts.slower, parts.kv
        self._preparer, self._admission, self._intake = parts.preparer, parts.admission, parts.intake
        self._prepare_pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="fovea-prepare")
        self._draining = False
        self.loop.start()

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> Engine:
        """`name`: a folder, a hub id, or "fovea-tiny". `settings` are fields of EngineConfig.

        Raises CheckpointError, UnsupportedModel or ConfigError.
        """
        config = replace(config or EngineConfig(), **settings) if settings else config or EngineConfig()
        if config.threads:
            torch.set_num_threads(config.threads)
        return cls(load_model(name, config, chat_template=chat_template), config)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def rename(self, name: str) -> None:
        """The name that clients use for this model."""
        self._info = replace(self._info, name=name)

    @property
    def status(self) -> EngineStatus:
        return "ready" if self.loop.alive and not self._draining else "stopped"

    def generate(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        *,
        sampling: SamplingParams | None = None,
        budget: PixelBudget | None = None,
        videos: Sequence[Any] = (),
        video_budget: VideoBudget | None = None,
        **params: Any,
    ) -> Completion:
        """The whole answer. `params` are fields of SamplingParams; what is not given is the checkpoint's default.

        Also: cache_salt, timeout (seconds), priority, as in GenerationRequest.
        prompt: a question, OpenAI-style messages, or a Prompt. images: paths, bytes or PIL images, put before a question.
        videos: paths, bytes or lists of frames (whatever an image may be, of one size), put after the images.
        """
        given = {"videos": videos, "video_budget": video_budget, **params}
        request = self.request(prompt, images, sampling=sampling, budget=budget, **given)
        answer = AnswerBuilder(request.sampling.n)
        for delta in self.iterate(request):
            answer.add(delta)
        return answer.build()

    async def stream(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        *,
        sampling: SamplingParams | None = None,
        budget: PixelBudget | None = None,
        videos: Sequence[Any] = (),
        video_budget: VideoBudget | None = None,
        **params: Any,
    ) -> AsyncIterator[Delta]:
        """Deltas as they come. Leaving the loop early cancels the request and frees its blocks.

        `prompt` may be a GenerationRequest, which is how servers call it; nothing may stand beside one.
        """
        loop = asyncio.get_running_loop()
        given = {"videos": videos, "video_budget": video_budget, **params}
        ask = partial(self.request, prompt, images, sampling=sampling, budget=budget, **given)
        # A request that is one already needs no decoding, so no thread: it is admitted and its clock starts at once.
        complete = isinstance(prompt, GenerationRequest)
        request = ask() if complete else await loop.run_in_executor(self._prepare_pool, ask)
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        visit = self._visit(request, sink)
        try:
            await walk_async(visit.steps(), self._prepare_pool, request.timeout)
            while not visit.done:
                yield visit.take(await events.get())
        finally:
            visit.leave()

    def request(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        *,
        sampling: SamplingParams | None = None,
        budget: PixelBudget | None = None,
        videos: Sequence[Any] = (),
        video_budget: VideoBudget | None = None,
        cache_salt: str = "",
        timeout: float | None = None,
        priority: int = 0,
        **params: Any,
    ) -> GenerationRequest:
        """A request from what a caller has at hand; decodes images. `params` as in `generate`."""
        if isinstance(prompt, GenerationRequest):
            beside = (images, videos, sampling, budget, video_budget, params, cache_salt, timeout, priority)
            if any(beside):
                raise InvalidRequest("a GenerationRequest is complete; nothing may be given beside it")
            return prompt
        if sampling is not None and params:
            raise InvalidRequest(f"{next(iter(params))} belongs into sampling when sampling is given")
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=to_prompt(prompt, images, budget, videos, video_budget),
            sampling=sampling or self.sampling(params),
            cache_salt=cache_salt,
            timeout=timeout,
            priority=priority,
        )

    def sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        """SamplingParams from what was said, over the checkpoint's defaults. Raises InvalidRequest for unknown names."""
        known = {field.name for field in fields(SamplingParams)}
        unknown = sorted(set(params) - known)
        if unknown:
            raise InvalidRequest(
                f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(known))}", param=unknown[0]
            )
        return SamplingParams(**{**self._info.default_sampling, **params})

    def outline(self, prompt: Prompt) -> PreparedPrompt:
        """The prompt as the decoder will see it: tokens and the plans of its images. No pixel is touched."""
        return self._preparer.builder.outline(prompt, "", self._info.max_context)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        loop = asyncio.get_running_loop()
        outline = await loop.run_in_executor(self._prepare_pool, self.outline, prompt)
        claim = self._preparer.claim_frames(outline)
        try:
            await shared(claim.granted)
            settled = self._preparer.settle(outline)
            await shared(settled)
        finally:
            claim.release()
        return settled.result().ids

    def clear_caches(self, *stages: CacheStage) -> None:
        """Forget shared prefixes ("kv"), processed pixels ("pixels"), and encoder outputs: of the device ("encoder"),
        those of images' regions ("regions"), in host memory ("host"), on disk ("disk"); all by default.

        Answers stay the same; they only cost again.
        """
        chosen = stages or CACHE_STAGES

        def clear() -> None:
            if "kv" in chosen:
                self._kv.forget_all()
            if "encoder" in chosen:
                self._embeddings.clear()
            if "regions" in chosen:
                self._regions.clear()

        self.loop.call(clear)
        self._slower.clear(*chosen)
        if "pixels" in chosen:
            self._preparer.pixels.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and encoder output is accounted for."""
        self.loop.call(self.scheduler.check_integrity)
        if self._regions is not None:
            self.loop.call(self._regions.check_integrity)

    def stats(self) -> Mapping[str, float]:
        return engine_stats(self.scheduler, self.loop, self._preparer, self._slower, self._regions)

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds, abort the rest, stop."""
        self._draining = True
        until = time.monotonic() + drain_s
        while self._admission.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stop at once; what runs is aborted."""
        self._draining = True
        self.loop.close()
        self._preparer.close()
        self._slower.close()
        self._prepare_pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def iterate(self, request: GenerationRequest) -> Iterator[Delta]:
        """`stream` without asyncio. Closing the generator cancels the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        visit = self._visit(request, events.put)
        try:
            walk(visit.steps(), None if request.timeout is None else visit.arrival + request.timeout)
            while not visit.done:
                yield visit.take(events.get())
        finally:
            visit.leave()

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down")
        self._admission.check(choices, reserved)

    def _visit(self, request: GenerationRequest, sink: Sink) -> Visit:
        self.check_room(request.sampling.n)
        return self._intake.visit(request, sink)
