"""Everything before a request's first step: template, tokens, limits, pixels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest, ModelInfo
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.detokenize import TextStream
from fovea.engine.events import Sink
from fovea.engine.job import Job
from fovea.engine.pixels import Claim, PixelStore, PixelTask
from fovea.engine.prompt import PreparedPrompt, PromptBuilder
from fovea.engine.sequence import Sequence
from fovea.engine.tokenizer import ChatTokenizer
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.tiers import SlowerTiers


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that fits, and who makes its pixels, by image key. seconds: what building it took.

    stored: images whose encoder output lies in a slower tier, so that no pixels are needed if it can be read.
    """

    prompt: PreparedPrompt
    max_tokens: int
    tasks: dict[str, PixelTask]
    stored: frozenset[str]
    seconds: float


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
        """Template, tokens and limits. Raises RequestError for what can not run. For a worker thread: milliseconds.

        load: of the engine, which may lower the level at which images are looked at.
        """
        started = time.monotonic()
        fits = partial(check_lengths, sampling=request.sampling, info=info, usual=request.usual_tokens)
        prompt = self.builder.build(request.prompt, request.cache_salt, info.max_context, fits, load)
        max_tokens = fits(prompt)
        check_token_ids(prompt, request.sampling, info.vocab_size)
        tasks = {planned.key: self._pixels.task(planned) for planned in prompt.planned}
        stored = self._slower.find(key for key in tasks if key not in self._embeddings)
        return Prepared(prompt, max_tokens, tasks, stored, time.monotonic() - started)

    def claim(self, prepared: Prepared) -> Claim:
        """Room for the pixels that the encoder will need, or for its outputs in slower tiers. What memory holds needs none."""
        missing = [image for image in prepared.prompt.planned if image.key not in self._embeddings]
        pixels = [prepared.tasks[image.key] for image in missing if image.key not in prepared.stored]
        outputs = sum(image.plan.tokens for image in missing if image.key in prepared.stored)
        return self._pixels.gate.claim(pixels, outputs * self._token_bytes)

    def read(self, prepared: Prepared, claim: Claim) -> dict[str, VisualFeatures]:
        """What lies in slower tiers. For a worker thread. An output that is gone after all becomes pixels of the claim."""
        found = {}
        planned = {span.key: span.tokens for span in prepared.prompt.spans}
        for key in prepared.stored:
            if key in self._embeddings:
                continue
            features = self._slower.get(key, planned[key])
            if features is None:
                claim.add(prepared.tasks[key])
            else:
                found[key] = features
        return found

    def jobs(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        found: dict[str, VisualFeatures],
        sink: Sink,
        arrival: float,
        pixels_s: float,
    ) -> list[Job]:
        """A job per choice, ready for the loop. arrival: on the monotonic clock; deadlines count from it."""
        return [
            Job(
                seq=Sequence(
                    id=f"{request.id}:{choice}",
                    prompt_ids=prepared.prompt.ids,
                    sampling=request.sampling,
                    max_tokens=prepared.max_tokens,
                    spans=prepared.prompt.spans,
                    salt=request.cache_salt,
                    arrival=arrival,
                    deadline=None if request.timeout is None else arrival + request.timeout,
                    priority=request.priority,
                    encode_only=request.encode_only,
                ),
                choice=choice,
                pixels=dict(prepared.tasks),
                found=found,
                sink=sink,
                text=self._text_stream(request.sampling),
                fetch_s=request.fetch_s,
                media_decode_s=request.media_decode_s,
                preprocess_s=prepared.seconds + pixels_s,
            )
            for choice in range(request.sampling.n)
        ]

    @property
    def pixel_bytes(self) -> int:
        """Processed pixels and outputs read from slower tiers that wait for their step, about."""
        return self._pixels.gate.bytes

    def close(self) -> None:
        self._pixels.close()

    def _text_stream(self, sampling: SamplingParams) -> TextStream:
        skip = sampling.skip_special_tokens
        return TextStream(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip),
            sampling.stop,
            min_tokens=sampling.min_tokens,
        )


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
