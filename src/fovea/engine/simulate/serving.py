"""An engine client without a model: real prompts, filler answers, and simulated latencies in real time.

Servers, gateways and clients can be tested against it. The loop, the scheduler, admission, queues, caches,
deadlines and cancellation are those of the real engine; only the executor is a cost model, so the tokens mean
nothing.

Prompts are made with the bundled model's tokenizer, template and image plans, without torch and transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from fovea.core.errors import InvalidRequest, Unavailable
from fovea.core.media import VisualTokens
from fovea.core.names import bundled_model
from fovea.core.protocols import CACHE_STAGES, CacheStage, EngineStatus
from fovea.core.types import Delta, GenerationRequest, ModelInfo, Prompt, Rendered
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.config import EngineConfig
from fovea.engine.files import read_json
from fovea.engine.job import Event, Job, take_waiting
from fovea.engine.keep import KeepPolicy
from fovea.engine.publish import CacheEvents
from fovea.engine.request.admission import Admission, FirstTokenGate, leave_at_end, request_size
from fovea.engine.request.answer import AnswerState
from fovea.engine.request.plain_tokenizer import PlainTokenizer
from fovea.engine.request.prepare import build_jobs, check_lengths, to_sequence
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.render import render
from fovea.engine.request.tokenizer import MARKER_FIELDS, ChatTokenizer, detokenize
from fovea.engine.request.work_queue import WorkQueue, text_cost
from fovea.engine.schedule.first_tokens import Expectation
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.assemble import context_limit, pool_tokens, simulated_stepper
from fovea.engine.simulate.executor import CostExecutor, Filler, RealtimeExecutor
from fovea.engine.step.executor import Executor
from fovea.engine.step.loop import EngineLoop
from fovea.engine.step.stats import loop_stats, scheduler_stats
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.video import FILE as VIDEO_FILE
from fovea.engine.vision.processor.video import build_videos
from fovea.engine.visual_budget.detail import DetailRule
from fovea.engine.visual_budget.methods import parse_visual_tokens
from fovea.planner.cost import CostModel

FOLDER = bundled_model()


class SimulatedEngine:
    """An engine client over a cost model. It implements `core.protocols.EngineClient`.

    config: the engine's settings.
    cost: the cost model.
    name: the name that clients use.
    """

    def __init__(self, config: EngineConfig, cost: CostModel, name: str = "fovea-simulated") -> None:
        self.config = config
        self.cost = cost
        visual = parse_visual_tokens(config.visual.visual_tokens)
        self.tokenizer, self._builder = load_prompt_builder(
            DetailRule.of(config.visual),
            visual=visual,
            special_tokens_in_text=config.model.special_tokens_in_text,
        )
        self.filler = Filler(self.tokenizer)
        self._events = CacheEvents.open(config)
        stepper = simulated_stepper(config, cost, self._executor, events=self._events)
        self.scheduler = stepper.scheduler
        self.loop = EngineLoop(stepper, self.tokenizer)
        self._info = ModelInfo(
            name,
            "simulated",
            0,
            "none",
            "none",
            context_limit(config, cost),
            self.tokenizer.vocab_size,
            int(time.time()),
            max_running=config.schedule.max_running,
            tool_format=self.tokenizer.dialect.tools.name if self.tokenizer.dialect.tools else "",
        )
        refuse = config.schedule.when_full == "refuse"
        tokens = pool_tokens(config, cost)
        kv = config.kv
        self._keep = KeepPolicy.of(
            kv.kv_keep, kv.block_size, tokens, states=False, windows=False, whole_images=False
        )
        self.admission = Admission(config.schedule.max_in_flight, tokens, cost.kv_token_bytes, refuse=refuse)
        self._gate = FirstTokenGate(stepper.first_tokens, config.schedule)
        self._render_pool = WorkQueue(1, "fovea-render")
        self._draining = False
        self.loop.start()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return "ready" if self.loop.alive and not self._draining else "stopped"

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Yield the deltas of a request. An answer has max_tokens tokens, or about 64 without a limit."""
        self._require_running()
        form = request.sampling.format
        if form is not None:
            raise InvalidRequest(
                f"{form.param}: a simulated engine writes filler, which follows no format", param=form.param
            )
        keep = self._keep.rule(request.kv_keep)
        arrival = time.monotonic()
        ticket = self.admission.enter(request.sampling.n)
        events: asyncio.Queue[Event] = asyncio.Queue()
        outbox = self.loop.board.outbox
        deliver = leave_at_end(ticket, outbox.sink(asyncio.get_running_loop(), events))
        jobs: list[Job] = []
        described: Sequence | None = None
        try:
            prompt, max_tokens, described = await self._prepare(request, arrival)
            length = request.sampling.max_tokens or request.usual_tokens
            ticket.commit(request_size(len(prompt.ids), prompt.image_tokens, length, request.sampling.n))
            seconds = time.monotonic() - arrival
            jobs = build_jobs(
                request,
                prompt,
                max_tokens,
                self.tokenizer,
                deliver,
                arrival=arrival,
                preprocess_s=seconds,
                keep=keep,
            )
            self.loop.submit(jobs)
            answer = AnswerState(request.id, prompt, [job.reader for job in jobs])
            while not answer.done:
                for event in await take_waiting(events):
                    yield answer.take(event)
        finally:
            ticket.leave()
            if described is not None:
                self._gate.leave(described)
            unfinished = [job.seq.id for job in jobs if job.seq.finish_reason is None]
            if unfinished:
                self.loop.cancel(unfinished)

    def check_room(self, choices: int, reserved: int = 0) -> None:
        self._require_running()
        self.admission.check(choices, reserved)

    def _require_running(self) -> None:
        if self.status != "ready":
            raise Unavailable("the server is shutting down" if self._draining else "the engine has stopped")

    async def detokenize(self, ids: Seq[int]) -> str:
        return await asyncio.to_thread(detokenize, self.tokenizer, ids)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        prepared = await asyncio.to_thread(self._builder.build, prompt, "", self._info.max_context)
        return prepared.ids

    async def render(self, request: GenerationRequest, /) -> Rendered:
        """Return the prompt that would be computed for a request now. No pixel is read."""
        self._require_running()
        return await self._render_pool.run(
            partial(render, request, self._outline, self._gate), text_cost(request.prompt)
        )

    async def release_offers(self, offers: Seq[Mapping[str, Any]]) -> None:
        """Nothing: a simulated engine offers nothing."""

    def clear_caches(self, *stages: CacheStage) -> None:
        """Empty the simulated caches, all of them if no stage is named.

        Only "kv" and "encoder" hold anything: there are neither pixels nor texts of answers.

        Blocks until the running step is over.
        """
        chosen = stages or CACHE_STAGES

        def clear() -> None:
            if "kv" in chosen:
                self.scheduler.kv.forget_all()
            if "encoder" in chosen:
                self.scheduler.embeddings.clear()

        self.loop.call(clear)

    def stats(self) -> Mapping[str, float]:
        return {
            **scheduler_stats(self.scheduler),
            **loop_stats(self.loop),
            **self._gate.stats(),
            **self._events.stats(),
        }

    async def close(self, drain_s: float = 0.0) -> None:
        self._draining = True
        drain_end = time.monotonic() + drain_s
        while self.admission.in_flight and time.monotonic() < drain_end:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.loop.close)
        await asyncio.to_thread(self._events.close)
        self._render_pool.close()

    def _executor(self, embeddings: EmbeddingCache[None]) -> Executor:
        return RealtimeExecutor(CostExecutor(self.cost, embeddings, self.filler.token), self.filler)

    async def _prepare(
        self, request: GenerationRequest, arrival: float
    ) -> tuple[PreparedPrompt, int, Sequence]:
        """Return the prompt, the length limit of its answers, and the sequence that the gate has counted.

        Raises InvalidRequest or PromptTooLong, and Overloaded if its first token would be late.
        """
        if request.sampling.logprobs:
            raise InvalidRequest("a simulated model has no logprobs", param="logprobs")
        for steps_down in self._gate.attempts:
            prompt, max_tokens, described, expected = await asyncio.to_thread(
                self._describe, request, arrival, steps_down
            )
            if not prompt.images or not self._gate.late(described, expected):
                break
        self._gate.enter(described, expected, steps_down)
        return prompt, max_tokens, described

    def _describe(
        self, request: GenerationRequest, arrival: float, steps_down: int
    ) -> tuple[PreparedPrompt, int, Sequence, Expectation]:
        """Build the prompt and predict the first token. For a worker thread."""
        outline, max_tokens = self._outline(request, steps_down)
        prompt = self._builder.settle(outline)
        described = to_sequence(request, prompt, max_tokens, arrival)
        return prompt, max_tokens, described, self._gate.expect(described)

    def _outline(self, request: GenerationRequest, steps_down: int) -> tuple[PreparedPrompt, int]:
        """Build the prompt without decoding videos. Returns it with the length limit of an answer."""
        prompt = self._builder.outline(
            request.prompt, request.cache_salt, self._info.max_context, self.admission.load, steps_down
        )
        return prompt, check_lengths(prompt, request.sampling, self._info, request.usual_tokens)


def load_prompt_builder(
    detail: DetailRule | None = None,
    visual: VisualTokens | None = None,
    special_tokens_in_text: bool = False,
) -> tuple[ChatTokenizer, PromptBuilder]:
    """Return the tokenizer and the prompt builder of the bundled model.

    detail: the rule for `detail: auto`; None: the model's own resolution.
    visual: how many visual tokens images keep; None: all.
    special_tokens_in_text: control tokens in the text of messages are control tokens, not text.
    """
    folder = FOLDER
    plain, config = PlainTokenizer(folder), read_json(folder / "config.json")
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    ends = read_json(folder / "generation_config.json")["eos_token_id"]
    ends = {*ends} if isinstance(ends, list) else {ends}
    markers = frozenset(config[name] for name in MARKER_FIELDS if name in config)
    ends |= {plain.get_vocab()[plain.eos_token]}
    tokenizer = ChatTokenizer(plain, template, eos_ids=frozenset(ends), marker_ids=markers)
    kind, images = config["model_type"], read_json(folder / "preprocessor_config.json")
    videos = build_videos(kind, read_json(folder / VIDEO_FILE), images, config, {})
    video_plans = (videos, config["video_token_id"]) if videos else None
    processor, token = build(kind, images, config), config["image_token_id"]
    return tokenizer, PromptBuilder(
        tokenizer,
        processor,
        token,
        video_plans,
        detail=detail,
        visual=visual,
        special_tokens_in_text=special_tokens_in_text,
    )
