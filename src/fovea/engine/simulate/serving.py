"""An engine client without a model: real prompts, filler answers, and the latencies of the simulation in real time.

Servers, gateways and clients can be tested against it: queues, caches, deadlines and cancellations are those of the real
scheduler, only the tokens mean nothing. It lives in the event loop that calls it; while anybody waits, one task there
sleeps through step after step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from fovea.core.errors import DeadlineExceeded, EngineError, FoveaError, InvalidRequest, Unavailable
from fovea.core.protocols import CACHE_STAGES, CacheStage, EngineStatus
from fovea.core.types import Delta, FinishReason, GenerationRequest, ModelInfo, Prompt
from fovea.engine.config import EngineConfig
from fovea.engine.events import Event
from fovea.engine.job import Job
from fovea.engine.request.admission import Admission, cost
from fovea.engine.request.answer import AnswerState
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.schedule.stats import scheduler_stats
from fovea.engine.simulate.cost import CostModel
from fovea.engine.simulate.intake import Intake
from fovea.engine.simulate.machine import Machine, Step
from fovea.engine.visual_budget.detail import DetailRule
from fovea.engine.visual_budget.methods import policy

log = logging.getLogger("fovea.simulate")
LAG_S = 0.05
"""How late a step may be and still be caught up with: timers tick in milliseconds, a step may be shorter."""
STALL_S = 0.002


class SimulatedEngine:
    def __init__(self, config: EngineConfig, cost: CostModel, name: str = "fovea-simulated") -> None:
        self.config = config
        self.cost = cost
        self.intake = Intake(DetailRule.of(config), policy(config.visual_tokens))
        self._jobs: dict[str, Job] = {}
        self.machine = Machine(config, cost, self.intake.token)
        context = min(config.max_context or cost.max_context, self.machine.capacity)
        self._info = ModelInfo(
            name, "simulated", 0, "none", "none", context, self.intake.tokenizer.vocab_size, int(time.time())
        )
        self._admission = Admission(
            config.room, self.machine.capacity, cost.kv_token_bytes, refuse=config.when_full == "refuse"
        )
        self._generated = 0
        self._failed_steps = 0
        self._draining = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> EngineStatus:
        return "stopped" if self._draining or self._failed_steps else "ready"

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """As EngineClient has it. An answer has max_tokens tokens, or about 64 where the request does not say."""
        self.check_room(request.sampling.n)
        arrival = time.monotonic()
        ticket = self._admission.enter(request.sampling.n)
        jobs: list[Job] = []
        try:
            prepared = await self.intake.prepare(request, self._info.max_context, self._admission.load)
            asked = request.sampling.max_tokens or request.usual_tokens
            ticket.commit(cost(len(prepared.ids), prepared.image_tokens, asked, request.sampling.n))
            events: asyncio.Queue[Event] = asyncio.Queue()
            jobs = self._submit(request, prepared, events, arrival)
            state = AnswerState(prepared, request.sampling.n)
            while not state.done:
                yield state.take(await events.get())
        finally:
            ticket.leave()
            for job in jobs:
                if self._jobs.get(job.seq.id) is job:
                    self._end(job, "abort")

    def check_room(self, choices: int, reserved: int = 0) -> None:
        if self.status != "ready":
            raise Unavailable("the server is shutting down" if self._draining else "the engine has stopped")
        self._admission.check(choices, reserved)

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return await self.intake.tokenize(prompt, self._info.max_context)

    def clear_caches(self, *stages: CacheStage) -> None:
        """Forget what the simulated caches hold, all of them where none is named."""
        chosen = stages or CACHE_STAGES

        def clear() -> None:
            if "kv" in chosen:
                self.machine.scheduler.kv.forget_all()
            if "encoder" in chosen:
                self.machine.scheduler.embeddings.clear()
            done.set()

        done = threading.Event()
        if self._task is None or self._task.done():
            clear()
        else:  # its loop, and no other thread, touches the scheduler
            self._task.get_loop().call_soon_threadsafe(clear)
        done.wait(LAG_S * 100)

    def stats(self) -> Mapping[str, float]:
        machine = self.machine
        return {
            **scheduler_stats(machine.scheduler),
            "images_encoded": machine.encoder.images,
            "encode_seconds": machine.encoder.seconds,
            "engine_steps": machine.steps,
            "failed_steps": self._failed_steps,
            "computed_tokens": machine.computed_tokens,
            "generation_tokens": self._generated,
        }

    async def close(self, drain_s: float = 0.0) -> None:
        self._draining = True
        until = time.monotonic() + drain_s
        while self._admission.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._closed = True
        for job in list(self._jobs.values()):
            self._end(job, "abort", Event(job.choice, finish_reason="abort"))
        if self._task is not None:
            await self._task

    def _submit(
        self,
        request: GenerationRequest,
        prepared: PreparedPrompt,
        events: asyncio.Queue[Event],
        arrival: float,
    ) -> list[Job]:
        if self._closed or self._failed_steps:  # while the prompt was built
            raise Unavailable("the engine has stopped")
        if any(f"{request.id}:{choice}" in self._jobs for choice in range(request.sampling.n)):
            raise InvalidRequest(f"request {request.id!r} is running already", param="id")
        jobs = self.intake.jobs(request, prepared, self._info.max_context, events.put_nowait, arrival)
        for job in jobs:
            self._jobs[job.seq.id] = job
            self.machine.add(job.seq)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="fovea-simulated")
        return jobs

    async def _run(self) -> None:
        """Step after step until nobody waits. A step begins when the last one is over, however long Python took."""
        due = time.monotonic()
        try:
            while self._expire():
                step = self.machine.begin()
                self._mark(step)
                seconds = step.seconds + self.cost.between_s if step.plan else STALL_S
                due = max(due, time.monotonic() - LAG_S) + seconds
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                for seq in self.machine.end(step):
                    self._tell(self._jobs[seq.id])
            self.machine.scheduler.check_integrity()
        except Exception:
            self._failed_steps += 1
            log.exception("the simulated engine failed")
            error = EngineError("the simulated engine stopped unexpectedly; see the server's log")
            for job in list(self._jobs.values()):
                self._end(job, "error", Event(job.choice, finish_reason="error", error=error))

    def _expire(self) -> bool:
        """End those whose deadline has passed; whether anybody is left."""
        for seq in self.machine.scheduler.expired(time.monotonic()):
            job = self._jobs[seq.id]
            error: FoveaError = DeadlineExceeded("the request's timeout ran out", param="timeout")
            self._end(job, "error", Event(job.choice, finish_reason="error", error=error))
        return bool(self._jobs)

    def _mark(self, step: Step) -> None:
        """When requests are admitted, and what their images cost; those that only wanted them encoded end here."""
        now = time.monotonic()
        for encode in step.plan.encode:
            if encode.span.key in step.encoded:
                self._jobs[encode.holders[0]].encode_s += self.cost.image(encode.span.tokens)
        for seq_id in (*(item.seq.id for item in step.plan.work), *step.plan.encoded_ids):
            job = self._jobs[seq_id]
            if job.admitted is None:
                job.admitted, job.encoded_before_s, job.last_token = now, job.encode_s, now
        for seq_id in step.plan.encoded_ids:
            job = self._jobs[seq_id]
            self._end(job, "length", Event(job.choice, finish_reason="length", timings=job.timings))

    def _tell(self, job: Job) -> None:
        """One new token: to text, to the one who waits, and perhaps the end."""
        seq, now = job.seq, time.monotonic()
        job.first_token = job.first_token or now
        job.last_token = now
        self._generated += 1
        token = seq.output_ids[-1]
        text = job.text.push(token)
        reason: FinishReason | None = None
        if len(seq.output_ids) >= seq.max_tokens:
            reason = "stop" if seq.sampling.max_tokens is None else "length"
            text += job.text.finish()
        if job.text.stopped:
            reason = "stop"
        event = Event(
            job.choice,
            text=text,
            token_ids=(token,),
            finish_reason=reason,
            cached_tokens=seq.cached_tokens,
        )
        if reason is None:
            job.sink(event)
        else:
            self._end(job, reason, replace(event, timings=job.timings))

    def _end(self, job: Job, reason: FinishReason, event: Event | None = None) -> None:
        """End a job at any point of its life; everything it held comes back."""
        self.machine.finish(job.seq, reason)
        del self._jobs[job.seq.id]
        self.intake.forget(job.seq)
        if event is not None:
            job.sink(event)
