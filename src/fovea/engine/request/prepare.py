"""Everything before a request's first step: template, tokens, limits, pixels."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.sampling import SamplingParams
from fovea.core.stage import stage
from fovea.core.types import GenerationRequest, ModelInfo
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.events import Sink
from fovea.engine.job import Job, PixelSource, SequenceInputs
from fovea.engine.request.jobs import build_jobs
from fovea.engine.request.pixel_pool import Claim, PixelPool
from fovea.engine.request.pixels import BYTES_PER_PIXEL, PixelStore, PixelTask
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan

if TYPE_CHECKING:  # tensors pass through here, and nothing of torch is needed for that
    from fovea.engine.tiers.slower import SlowerTiers
    from fovea.engine.vision.features import VisualFeatures


@dataclass(frozen=True, slots=True)
class Prepared:
    """The outline of a prompt that fits, and who makes its pixels, by image key. seconds: what building it took.

    stored: images whose encoder output lies in a slower tier, so that no pixels are needed if it can be read.
    """

    prompt: PreparedPrompt
    max_tokens: int
    tasks: dict[str, PixelTask]
    stored: frozenset[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A prompt whose pixels have room. found: outputs of slower tiers, by image key, until they are a cache's or the claim
    ends. needed: those whose pixels are."""

    prompt: PreparedPrompt
    tasks: dict[str, PixelTask]
    found: dict[str, VisualFeatures]
    needed: tuple[PixelTask, ...]


class Preparer:
    def __init__(
        self,
        tokenizer: ChatTokenizer,
        builder: PromptBuilder,
        pixels: PixelStore,
        embeddings: EmbeddingCache[VisualFeatures],
        slower: SlowerTiers,
        token_bytes: int,
    ) -> None:
        """token_bytes: of the encoder's output, per visual token."""
        self.builder = builder
        self._tokenizer = tokenizer
        self._pixels = pixels
        self._embeddings = embeddings
        self._slower = slower
        self._token_bytes = token_bytes

    def build(self, request: GenerationRequest, info: ModelInfo, load: float = 0.0) -> Prepared:
        """Template, tokens and limits. Raises RequestError for what cannot run. For a worker thread: milliseconds.

        load: of the engine, which may lower the level at which images are looked at.
        """
        started = time.monotonic()
        fits = partial(check_lengths, sampling=request.sampling, info=info, usual=request.usual_tokens)
        with stage("tokenize"):
            prompt = self.builder.outline(request.prompt, request.cache_salt, info.max_context, load)
            max_tokens = fits(prompt)
            check_token_ids(prompt, request.sampling, info.vocab_size)
        tasks = {planned.key: self._pixels.task(planned) for planned in prompt.planned}
        stored = self._slower.find(key for key in tasks if key not in self._embeddings)
        return Prepared(prompt, max_tokens, tasks, stored, time.monotonic() - started)

    def claim(self, prepared: Prepared) -> Claim:
        """Room for the pixels that the encoder will need, or for its outputs in slower tiers. What memory holds needs none.

        A pruned video that nobody has looked at claims its frames and the pixels of all of them.
        """
        missing = [image for image in prepared.prompt.planned if image.key not in self._embeddings]
        tasks = [prepared.tasks[image.key] for image in missing if image.key not in prepared.stored]
        outputs = sum(image.plan.tokens for image in missing if image.key in prepared.stored)
        unseen = prepared.prompt.unsettled
        things = [thing for task in tasks for thing in task.things] + [video.clip for video in unseen]
        pixels = sum(video.pixels for video in unseen)
        return self._pixels.pool.claim(things, outputs * self._token_bytes + pixels * BYTES_PER_PIXEL)

    def claim_frames(self, outline: PreparedPrompt) -> Claim:
        """Room for no more than a look at the videos."""
        return self._pixels.pool.claim(video.clip for video in outline.unsettled)

    def settle(self, outline: PreparedPrompt) -> Future[PreparedPrompt]:
        """The prompt itself, when its videos have been looked at. For whoever's claim is granted.

        Raises Unavailable when the engine has stopped.
        """
        if outline.unsettled:
            return self._pixels.run(partial(self.builder.settle, outline))
        settled: Future[PreparedPrompt] = Future()
        settled.set_result(outline)
        return settled

    def read(self, prepared: Prepared, prompt: PreparedPrompt, claim: Claim) -> Ready:
        """What lies in slower tiers, and whose pixels have to be made. For a worker thread. prompt: settled.

        An output that is gone after all becomes pixels of the claim.
        """
        tasks = prepared.tasks | {
            planned.key: self._pixels.task(planned)
            for planned in prompt.planned
            if planned.key not in prepared.tasks
        }
        missing = [planned for planned in prompt.planned if planned.key not in self._embeddings]
        later = self._slower.find(planned.key for planned in missing if planned.key not in prepared.tasks)
        found: dict[str, VisualFeatures] = {}
        needed: dict[PixelTask, None] = {}
        for planned in missing:
            key = planned.key
            stored = key in prepared.stored or key in later
            features = self._slower.get(key, planned.plan.tokens) if stored else None
            if features is not None:
                found[key] = features
                continue
            needed[tasks[key]] = None
            for thing in tasks[key].things:
                claim.add(thing, foreseen=key not in prepared.tasks)
        return Ready(prompt, tasks, found, tuple(needed))

    def jobs(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        ready: Ready,
        claim: Claim,
        sink: Sink,
        arrival: float,
        pixels_s: float,
    ) -> list[Job]:
        """One job per choice, ready for the loop. arrival: on the monotonic clock; deadlines count from it."""
        pixels: dict[str, PixelSource] = {
            planned.key: partial(_made, ready.tasks[planned.key], planned.plan, claim)
            for planned in ready.prompt.planned
        }
        return build_jobs(
            request,
            ready.prompt,
            prepared.max_tokens,
            self._tokenizer,
            sink,
            arrival=arrival,
            preprocess_s=prepared.seconds + pixels_s,
            inputs=lambda choice: SequenceInputs(choice, pixels, ready.found),
        )

    @property
    def pixel_bytes(self) -> int:
        """Processed pixels and outputs read from slower tiers that wait for their step, about."""
        return self._pixels.pool.stats().claimed

    @property
    def pixels(self) -> PixelPool:
        return self._pixels.pool

    def close(self) -> None:
        self._pixels.close()


def _made(task: PixelTask, plan: VisualPlan, claim: Claim) -> ProcessedImage:
    """Pixels for the encoder, and what is to become of them. Where a cache has lost what made them needless, they are claimed now."""
    for thing in task.things:
        claim.add(thing)
    return replace(task(), plan=plan)


def check_lengths(
    prepared: PreparedPrompt, sampling: SamplingParams, info: ModelInfo, usual: int | None = None
) -> int:
    """How many tokens the answer may have. Raises PromptTooLong with the numbers."""
    length, limit = len(prepared.ids), info.max_context
    room = limit - length
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {length} tokens ({prepared.image_tokens} of them visual, {prepared.contents}); "
            f"the context holds {limit}, answer included",
            param="messages",
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise PromptTooLong(
            f"max_tokens is {sampling.max_tokens}, but after the prompt's {length} tokens the context of {limit} "
            f"has room for {room}",
            param="max_tokens",
        )
    return sampling.max_tokens if sampling.max_tokens is not None else min(room, usual or room)


def check_token_ids(prepared: PreparedPrompt, sampling: SamplingParams, size: int) -> None:
    """Some tokenizers know more tokens than their model has embeddings for."""
    if max(prepared.ids) >= size:
        raise InvalidRequest(
            f"token {max(prepared.ids)} of the prompt is outside [0, {size})", param="prompt"
        )
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"{name}: token {token} is outside [0, {size})", param=name)
