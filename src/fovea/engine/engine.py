"""The engine for Python programs: load a checkpoint, ask about images, get text.

    engine = Engine.from_pretrained("fovea-tiny")
    print(engine.generate("What is in the picture?", images=["photo.png"], temperature=0).text)

    async for delta in engine.stream("Describe it.", images=["photo.png"]):
        print(delta.text, end="")

It is also the `EngineClient` that a server uses. Requests are prepared (template, tokens, pixels) in worker
threads; everything that touches the model happens in the loop's thread.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from fovea.core.errors import Unavailable
from fovea.core.protocols import CACHE_STAGES, CacheStage, EngineStatus
from fovea.core.sampling import SamplingParams
from fovea.core.types import (
    AnswerBuilder,
    Completion,
    Delta,
    GenerationRequest,
    ModelInfo,
    Prompt,
    Rendered,
    check_prompt_media,
)
from fovea.engine.assemble import assemble, engine_stats
from fovea.engine.config import EngineConfig, EngineOptions
from fovea.engine.intake import Visit, walk, walk_async
from fovea.engine.job import Event, Sink, take_waiting
from fovea.engine.layers.ranks import ALONE
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.parallel.places import divided
from fovea.engine.request.inputs import Images, PromptLike, RequestOptions, to_request, to_sampling
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.tokenizer import detokenize
from fovea.engine.request.work_queue import WorkQueue, text_cost, wait_for_shared
from fovea.engine.visual_budget.detail import DetailPolicy
from fovea.kernels.choose import set_threads

PREPARE_THREADS = 4


class Engine:
    """A loaded model with its scheduler, caches and loop.

    config: the engine's settings.
    tokenizer: the checkpoint's tokenizer and chat template.
    scheduler, loop, runner: the main components.
    parts: all components, for tests and measurements.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        detail_policy: DetailPolicy | None = None,
    ) -> None:
        """Start an engine with a loaded model. Raises ConfigError for settings that the model cannot follow.

        config: settings; None: the defaults.
        detail_policy: replaces the configured policy for `detail: auto`.
        """
        self.config = config or EngineConfig()
        set_threads(self.config.model.threads)
        assembly = assemble(loaded, self.config, detail_policy)
        self.tokenizer = loaded.tokenizer
        self.scheduler, self.loop, self.runner = assembly.scheduler, assembly.loop, assembly.runner
        self.parts = assembly
        self._info = assembly.info
        self._prepare_pool = WorkQueue(PREPARE_THREADS, "fovea-prepare", most_expensive=1)
        # Renders wait for each other, and no request waits for them.
        self._render_pool = WorkQueue(1, "fovea-render")
        self._draining = False
        self._ranks = loaded.model.ranks
        self._ranks.on_loss(self.loop.end)
        self.loop.start()

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        **settings: Unpack[EngineOptions],
    ) -> Engine:
        """Load a checkpoint and start an engine.

        name: a folder, a hub id, or "fovea-tiny".
        chat_template: a Jinja template that replaces the checkpoint's own.
        settings: replace settings of `config`, by their flat names.

        Raises CheckpointError, UnsupportedModel or ConfigError.
        """
        config = divided((config or EngineConfig()).changed(**settings))
        set_threads(config.model.threads)
        ranks = ALONE
        if config.parallel.size > 1:
            from fovea.engine.parallel.driver import start_ranks

            ranks = start_ranks(name, config)
        try:
            return cls(load_model(name, config, chat_template=chat_template, ranks=ranks), config)
        except BaseException:
            ranks.close()
            raise

    @property
    def unfinished(self) -> int:
        """Number of unfinished choices of all requests."""
        return len(self.loop.board.jobs)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def rename(self, name: str) -> None:
        """Set the name that clients use for this model."""
        self._info = replace(self._info, name=name)

    @property
    def status(self) -> EngineStatus:
        """The state of the engine: "ready" while it accepts requests, afterwards "stopped"."""
        return "ready" if self.loop.alive and not self._draining else "stopped"

    def generate(
        self, prompt: PromptLike, images: Images = (), **options: Unpack[RequestOptions]
    ) -> Completion:
        """Return the whole answer.

        prompt: a question, OpenAI-style messages, or a Prompt.
        images: inserted before a question; several, or one alone. With messages, images are content parts.
        options: sampling options, and those of `RequestOptions`. Sampling options that are not given have the
            checkpoint's defaults.
        Raises RequestError for a request that cannot run, EngineError if the engine fails, Unavailable if it
        has stopped.
        """
        request = self.request(prompt, images, **options)
        answer = AnswerBuilder(request.sampling.n)
        for delta in self.iterate(request):
            answer.add(delta)
        return answer.build()

    async def stream(
        self, prompt: PromptLike, images: Images = (), **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Delta]:
        """Yield deltas as they are generated.

        Leaving the loop early cancels the request and frees its blocks.

        Arguments as in `generate`. A GenerationRequest, which servers pass, must be given alone.
        """
        build = partial(self.request, prompt, images, **options)
        # A GenerationRequest already has decoded images. It needs no worker thread, so it is admitted, and
        # its timeout starts, at once.
        complete = isinstance(prompt, GenerationRequest)
        request = build() if complete else await self._prepare_pool.run(build)
        events: asyncio.Queue[Event] = asyncio.Queue()
        visit = self._visit(request, self.loop.board.outbox.sink(asyncio.get_running_loop(), events))
        try:
            cost = text_cost(request.prompt, request.prediction)
            await walk_async(visit.steps(), self._prepare_pool, request.timeout, cost)
            while not visit.done:
                for event in await take_waiting(events):
                    yield visit.take(event)
        finally:
            visit.leave()

    def request(
        self, prompt: PromptLike, images: Images = (), **options: Unpack[RequestOptions]
    ) -> GenerationRequest:
        """Build a request and decode its images. Arguments as in `generate`.

        Raises InvalidRequest for unknown options and for options that exclude each other.
        """
        return to_request(prompt, images, options, self._info.default_sampling)

    def sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        """Return sampling parameters; those not in `params` have the checkpoint's defaults.

        Raises InvalidRequest for unknown names.
        """
        return to_sampling(params, self._info.default_sampling)

    def outline(self, prompt: Prompt) -> PreparedPrompt:
        """Return the prompt's tokens and the plans of its images. No pixel is read.

        Raises InvalidRequest or PromptTooLong.
        """
        check_prompt_media(self._info, prompt)
        return self.parts.preparer.builder.outline(prompt, "", self._info.max_context)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the whole prompt, with a placeholder for each visual token.

        A pruned video may be decoded for it.

        Raises InvalidRequest, PromptTooLong or InvalidMedia for a prompt that cannot run, Unavailable when
        the engine has stopped.
        """
        outline = await self._prepare_pool.run(partial(self.outline, prompt), text_cost(prompt))
        reservation = self.parts.preparer.reserve_frames(outline)
        try:
            await wait_for_shared(reservation.granted)
            settled = self.parts.preparer.settle(outline)
            await wait_for_shared(settled)
        finally:
            reservation.release()
        return settled.result().ids

    async def render(self, request: GenerationRequest, /) -> Rendered:
        """Return the prompt that the engine would compute for this request now. No pixel is read.

        Requests are rendered one at a time, and take no place in the queue of those for an answer.

        Raises the errors of a request that cannot run, InvalidRequest if the result follows from pixels,
        Unavailable when the engine has stopped.
        """
        self._refuse_while_draining()
        return await self._render_pool.run(
            partial(self.parts.intake.render, request), text_cost(request.prompt)
        )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises InvalidRequest for an id that the model does not have, Unavailable when the engine has stopped.
        """
        return await self._prepare_pool.run(partial(detokenize, self.tokenizer, ids), len(ids))

    async def release_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """End offers to other engines. Raises InvalidRequest for what is no offer."""
        if self.parts.peering.handover is not None:
            self.parts.peering.handover.release(offers)

    def clear_caches(self, *stages: CacheStage) -> None:
        """Clear caches. Answers stay the same, but the cleared data has to be computed again.

        stages: "kv" (shared prefixes), "pixels" (processed pixels), "encoder" (encoder outputs on the
            device), "regions" (encoded regions of images), "host" (encoder outputs in host memory), "disk"
            (encoder outputs on disk), "answers" (texts of earlier answers); all if none is named.
        """
        chosen = stages or CACHE_STAGES

        def clear() -> None:
            if "kv" in chosen:
                self.parts.kv.forget_all()
            if "encoder" in chosen:
                self.parts.embeddings.clear()
            if "regions" in chosen:
                self.parts.regions.clear()
            if "answers" in chosen and self.parts.speculator is not None:
                self.parts.speculator.clear()

        self.loop.call(clear)
        self.parts.slower.clear(*chosen)
        if "pixels" in chosen:
            self.parts.preparer.pixel_pool.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and encoder output is accounted for."""
        self.loop.call(self.scheduler.check_integrity)
        if self.parts.regions is not None:
            self.loop.call(self.parts.regions.check_integrity)

    def stats(self) -> Mapping[str, float]:
        """Return the current value of every metric, by its name in `observe.table`.

        Names that end in `_bytes` are in bytes, in `_seconds` in seconds, in `_tokens` in tokens; the others
        are plain numbers.
        """
        return engine_stats(self.parts)

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain_s` seconds for running ones, abort the rest, and stop."""
        self._draining = True
        drain_end = time.monotonic() + drain_s
        while self.parts.admission.in_flight and time.monotonic() < drain_end:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Stop at once. Running requests are aborted."""
        self._draining = True
        self.loop.close()
        self.parts.events.close()
        self._ranks.close()
        self.parts.preparer.close()
        self.parts.intake.grammars.close()
        self.parts.peering.close()
        self.parts.slower.close()
        self._prepare_pool.close()
        self._render_pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def iterate(self, request: GenerationRequest) -> Iterator[Delta]:
        """Yield the deltas of a request, without asyncio. Closing the generator cancels the request."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        visit = self._visit(request, events.put)
        try:
            walk(visit.steps(), None if request.timeout is None else visit.arrival + request.timeout)
            while not visit.done:
                yield visit.take(events.get())
        finally:
            visit.leave()

    def check_room(self, choices: int, reserved: int = 0) -> None:
        """Check whether a request has room. Nothing is counted.

        choices: choices of the request.
        reserved: choices of other requests that were accepted but whose images are still being fetched.

        Raises InvalidRequest for a request that can never have room, Overloaded for one that has none now,
        Unavailable while the engine shuts down.
        """
        self._refuse_while_draining()
        self.parts.admission.check(choices, reserved)

    def _visit(self, request: GenerationRequest, sink: Sink) -> Visit:
        self._refuse_while_draining()
        return Visit(self.parts.intake, request, sink)

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down")
