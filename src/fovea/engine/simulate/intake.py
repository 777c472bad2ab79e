"""What stands before a simulated engine: a request's prompt, its limits, and the answer that it will get."""

from __future__ import annotations

import asyncio
import time

from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.image import VisualTokens
from fovea.core.types import GenerationRequest, Prompt
from fovea.engine.request.detokenize import TextStream
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.sequence import Sequence
from fovea.engine.simulate.bundled import prompts
from fovea.engine.simulate.filler import Filler
from fovea.engine.step.events import Sink
from fovea.engine.step.job import Job
from fovea.engine.visual_budget.detail import DetailRule


class Intake:
    """Requests become jobs here, and their answers' seeds are known until they are forgotten."""

    def __init__(self, detail: DetailRule, visual: VisualTokens | None) -> None:
        self.tokenizer, self._builder = prompts(detail, visual=visual)
        self._filler = Filler(self.tokenizer)
        self._seeds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._seeds)

    def token(self, seq: Sequence) -> int:
        """The next one of an answer."""
        return self._filler.token(self._seeds[seq.id], seq)

    def forget(self, seq: Sequence) -> None:
        del self._seeds[seq.id]

    async def tokenize(self, prompt: Prompt, limit: int) -> list[int]:
        built = await asyncio.to_thread(self._builder.build, prompt, "", limit)
        return built.ids

    async def prepare(self, request: GenerationRequest, limit: int, load: float) -> PreparedPrompt:
        """limit: tokens of the context. load: of the engine. Raises InvalidRequest or PromptTooLong for what can not run."""
        if request.sampling.logprobs:
            raise InvalidRequest("a simulated model has no logprobs", param="logprobs")
        prepared = await asyncio.to_thread(
            self._builder.build, request.prompt, request.cache_salt, limit, load=load
        )
        length = len(prepared.ids)
        if length + (request.sampling.max_tokens or 1) > limit:
            raise PromptTooLong(
                f"the prompt has {length} tokens ({prepared.image_tokens} of them visual, {prepared.contents}), "
                f"and {request.sampling.max_tokens or 1} are asked for; the context holds {limit}, answer included",
                param="messages" if length >= limit else "max_tokens",
            )
        return prepared

    def jobs(
        self, request: GenerationRequest, prepared: PreparedPrompt, limit: int, sink: Sink, arrival: float
    ) -> list[Job]:
        """A job per choice. arrival: on the monotonic clock; deadlines count from it."""
        sampling, spent = request.sampling, time.monotonic() - arrival
        room = limit - len(prepared.ids)
        jobs = []
        for choice in range(sampling.n):
            seed = self._filler.seed(prepared.ids, sampling, choice)
            seq = Sequence(
                id=f"{request.id}:{choice}",
                prompt_ids=prepared.ids,
                sampling=sampling,
                max_tokens=self._filler.length(seed, sampling, min(room, request.usual_tokens or room)),
                spans=prepared.spans,
                salt=request.cache_salt,
                arrival=arrival,
                deadline=None if request.timeout is None else arrival + request.timeout,
                priority=request.priority,
                encode_only=request.encode_only,
            )
            self._seeds[seq.id] = seed
            text = TextStream(self.tokenizer.decode, sampling.stop, min_tokens=sampling.min_tokens)
            jobs.append(
                Job(
                    seq, choice, {}, {}, sink, text,
                    fetch_s=request.fetch_s, media_decode_s=request.media_decode_s, preprocess_s=spent,
                )
            )  # fmt: skip
        return jobs
