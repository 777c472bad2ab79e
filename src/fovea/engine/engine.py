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
import logging
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
from fovea.core.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from fovea.core.image import PixelBudget
from fovea.core.protocols import CACHE_STAGES, CacheStage, EngineStatus
from fovea.core.sampling import SamplingParams
from fovea.core.types import Completion, Delta, GenerationRequest, ModelInfo, Prompt
from fovea.core.video import VideoBudget
from fovea.engine.admission import Admission, Ticket, cost
from fovea.engine.cache.blocks import BlockPool
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.cache.host_blocks import HostBlocks
from fovea.engine.cache.manager import KVManager
from fovea.engine.collect import AnswerState
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.events import Event
from fovea.engine.inputs import to_prompt
from fovea.engine.job import Job
from fovea.engine.loop import EngineLoop
from fovea.engine.memory import host_slots, pool_blocks
from fovea.engine.models.load import LoadedModel, load_model, prompt_builder
from fovea.engine.pixel_pool import Claim, PixelPool
from fovea.engine.pixels import PixelStore
from fovea.engine.prepare import Prepared, Preparer
from fovea.engine.prompt import PreparedPrompt
from fovea.engine.runner import Runner
from fovea.engine.sample.sampler import Sampler
from fovea.engine.schedule.scheduler import Scheduler
from fovea.engine.stats import engine_stats
from fovea.engine.vision.detail import DetailPolicy, DetailRule
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.tiers import slower_tiers
from fovea.engine.waiting import deadline, shared, until

log = logging.getLogger("fovea.engine")
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
        model, tokenizer = loaded.model, loaded.tokenizer
        blocks, slots = pool_blocks(self.config, model), host_slots(self.config, model)
        self.tokenizer = tokenizer
        self._slower = slower_tiers(self.config, loaded.fingerprint, model.device)
        self._embeddings: EmbeddingCache[VisualFeatures] = EmbeddingCache(
            self.config.embed_cache_mib * MIB,
            ttl_s=self.config.embed_ttl_s or None,
            evicted=self._slower.evicted,
        )
        self._kv = KVManager(
            BlockPool(blocks),
            self.config.block_size,
            share_prefixes=self.config.prefix_cache,
            host=HostBlocks(slots),
            ttl_s=self.config.kv_ttl_s,
        )
        self.scheduler = Scheduler(
            self.config, self._kv, self._embeddings, visual_token_bytes=model.visual_token_bytes
        )
        runner = Runner(
            model,
            self._embeddings,
            Sampler(frozenset(i for i in tokenizer.eos_ids if i < loaded.info.vocab_size)),
            blocks=blocks,
            block_size=self.config.block_size,
            host_blocks=slots,
            slower=self._slower,
        )
        self.loop = EngineLoop(self.scheduler, runner, tokenizer)
        detail = DetailRule.of(self.config)
        pixels = PixelPool(
            self.config.pixel_pool_mib * MIB,
            self.config.pixel_cache_mib * MIB,
            self.config.pixel_ttl_s or None,
        )
        self._preparer = Preparer(
            tokenizer,
            prompt_builder(loaded, replace(detail, policy=detail_policy or detail.policy)),
            PixelStore(loaded.processor, self.config.preprocess_workers, pixels),
            self._embeddings,
            self._slower,
            model.visual_token_bytes,
        )
        self._prepare_pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="fovea-prepare")
        limit = min(loaded.info.max_context, blocks * self.config.block_size)
        if self.config.max_context > limit:
            raise ConfigError(
                f"max_context is {self.config.max_context}; the model allows {loaded.info.max_context} tokens, "
                f"the KV pool holds {blocks * self.config.block_size}",
                param="max_context",
            )
        self._info = replace(loaded.info, max_context=self.config.max_context or limit)
        self._admission = Admission(
            self.config.room,
            blocks * self.config.block_size,
            runner.kv.nbytes // (blocks * self.config.block_size),
            refuse=self.config.when_full == "refuse",
        )
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

        ticket = self._enter(request)
        arrival = time.monotonic()
        jobs: list[Job] = []
        claim: Claim | None = None
        try:
            async with deadline(request.timeout):
                prepared = await loop.run_in_executor(
                    self._prepare_pool, self._preparer.build, request, self._info, self._admission.load
                )
                built = time.monotonic()
                self._commit(ticket, request, prepared)
                claim = self._preparer.claim(prepared)
                self._wait_or_refuse(claim)
                await shared(claim.granted)
                settled = self._preparer.settle(prepared.prompt)
                await shared(settled)
                ready = await loop.run_in_executor(
                    self._prepare_pool, self._preparer.read, prepared, settled.result(), claim
                )
                await asyncio.gather(*(shared(task.start()) for task in ready.needed))
            pixels_s = time.monotonic() - built
            jobs = self._preparer.jobs(request, prepared, ready, claim, sink, arrival, pixels_s)
            self.loop.submit(jobs)
            state = AnswerState(ready.prompt, request.sampling.n)
            while not state.done:
                delta = state.take(await events.get())
                claim.release()
                ready.found.clear()
                yield delta
        finally:
            self._leave(ticket, jobs, claim)

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
        """Forget shared prefixes ("kv"), processed pixels ("pixels"), and encoder outputs: of the device ("encoder"), in
        host memory ("host"), on disk ("disk"); all by default.

        Answers stay the same; they only cost again.
        """
        chosen = stages or CACHE_STAGES

        def clear() -> None:
            if "kv" in chosen:
                self._kv.forget_all()
            if "encoder" in chosen:
                self._embeddings.clear()

        self.loop.call(clear)
        self._slower.clear(*chosen)
        if "pixels" in chosen:
            self._preparer.pixels.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and encoder output is accounted for."""
        self.loop.call(self.scheduler.check_integrity)

    def stats(self) -> Mapping[str, float]:
        return engine_stats(self.scheduler, self.loop, self._preparer, self._slower)

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
        ticket = self._enter(request)
        arrival = time.monotonic()
        jobs: list[Job] = []
        claim: Claim | None = None
        try:
            prepared = self._preparer.build(request, self._info, self._admission.load)
            built = time.monotonic()
            self._commit(ticket, request, prepared)
            claim = self._preparer.claim(prepared)
            self._wait_or_refuse(claim)
            ends = None if request.timeout is None else arrival + request.timeout
            until(ends, claim.granted)
            settled = until(ends, self._preparer.settle(prepared.prompt))
            ready = self._preparer.read(prepared, settled, claim)
            for made in [task.start() for task in ready.needed]:
                until(ends, made)
            pixels_s = time.monotonic() - built
            jobs = self._preparer.jobs(request, prepared, ready, claim, events.put, arrival, pixels_s)
            self.loop.submit(jobs)
            state = AnswerState(ready.prompt, request.sampling.n)
            while not state.done:
                delta = state.take(events.get())
                claim.release()
                ready.found.clear()
                yield delta
        finally:
            self._leave(ticket, jobs, claim)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down")
        self._admission.check(choices, reserved)

    def _enter(self, request: GenerationRequest) -> Ticket:
        self.check_room(request.sampling.n)
        return self._admission.enter(request.sampling.n)

    def _commit(self, ticket: Ticket, request: GenerationRequest, prepared: Prepared) -> None:
        """What the request will take is known now; so is how closely its images are looked at."""
        prompt = prepared.prompt
        level = logging.DEBUG if self._preparer.builder.detail.lossless else logging.INFO
        for index, image in enumerate(prompt.images):
            seen = image.seen
            log.log(
                level,
                "%s: image %d at %s (%d tokens): %s",
                request.id,
                index,
                seen.detail,
                seen.tokens,
                seen.reason,
            )
        if not request.encode_only:
            asked = request.sampling.max_tokens or request.usual_tokens
            ticket.commit(cost(len(prompt.ids), prompt.image_tokens, asked, request.sampling.n))

    def _wait_or_refuse(self, claim: Claim) -> None:
        if self.config.when_full == "refuse" and not claim.granted.done():
            raise Overloaded(
                f"the request's images take about {claim.size / MIB:.1f} MiB of processed pixels; others have "
                f"{self._preparer.pixel_bytes / MIB:.1f} of {self.config.pixel_pool_mib} MiB",
                retry_after=1.0,
            )

    def _leave(self, ticket: Ticket, jobs: list[Job], claim: Claim | None) -> None:
        if claim is not None:
            claim.release()
        ticket.leave()
        unfinished = [job.seq.id for job in jobs if job.seq.finish_reason is None]
        if unfinished:
            self.loop.cancel(unfinished)
