"""Everything before a request's first step: template, tokens, limits, pixels. Runs in worker threads."""

from __future__ import annotations

import time

from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest, ModelInfo
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.detokenize import TextStream
from fovea.engine.events import Sink
from fovea.engine.job import Job
from fovea.engine.pixels import PixelStore, PixelTask
from fovea.engine.prompt import PreparedPrompt, PromptBuilder
from fovea.engine.sequence import Sequence
from fovea.engine.tokenizer import ChatTokenizer
from fovea.engine.vision.features import VisualFeatures


class Preparer:
    def __init__(
        self,
        tokenizer: ChatTokenizer,
        builder: PromptBuilder,
        pixels: PixelStore,
        embeddings: EmbeddingCache[VisualFeatures],
    ) -> None:
        self.builder = builder
        self._tokenizer = tokenizer
        self._pixels = pixels
        self._embeddings = embeddings

    def prepare(
        self, request: GenerationRequest, sink: Sink, info: ModelInfo
    ) -> tuple[list[Job], PreparedPrompt]:
        """A job per choice, ready for the loop. May wait for pixels. Raises RequestError for what can not run."""
        started = time.monotonic()
        prepared = self.builder.build(request.prompt, request.cache_salt, info.max_context)
        max_tokens = check_lengths(prepared, request.sampling, info)
        check_token_ids(prepared, request.sampling, info.vocab_size)
        pixels = self._start_pixels(prepared)
        preprocess = time.monotonic() - started
        deadline = None if request.timeout is None else started + request.timeout
        jobs = [
            Job(
                seq=Sequence(
                    id=f"{request.id}:{choice}",
                    prompt_ids=prepared.ids,
                    sampling=request.sampling,
                    max_tokens=max_tokens,
                    spans=prepared.spans,
                    salt=request.cache_salt,
                    arrival=started,
                    deadline=deadline,
                ),
                choice=choice,
                pixels=dict(pixels),
                sink=sink,
                text=self._text_stream(request.sampling),
                media_s=request.media_s,
                preprocess_s=preprocess,
            )
            for choice in range(request.sampling.n)
        ]
        return jobs, prepared

    def close(self) -> None:
        self._pixels.close()

    def _start_pixels(self, prepared: PreparedPrompt) -> dict[str, PixelTask]:
        """Tasks by image key. Pixels that the encoder will need are made now, side by side, not in its thread."""
        tasks = {planned.key: self._pixels.task(planned) for planned in prepared.images}
        needed = [task for key, task in tasks.items() if key not in self._embeddings]
        for task in needed:
            task.start()
        for task in needed:
            task.wait()
        return tasks

    def _text_stream(self, sampling: SamplingParams) -> TextStream:
        skip = sampling.skip_special_tokens
        return TextStream(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip),
            sampling.stop,
            min_tokens=sampling.min_tokens,
        )


def check_lengths(prepared: PreparedPrompt, sampling: SamplingParams, info: ModelInfo) -> int:
    """How many tokens the answer may have. Raises PromptTooLong with the numbers."""
    length, limit = len(prepared.ids), info.max_context
    room = limit - length
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {length} tokens ({prepared.image_tokens} of them visual, {len(prepared.images)} images); "
            f"the context holds {limit}, answer included",
            param="messages",
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise PromptTooLong(
            f"max_tokens is {sampling.max_tokens}, but after the prompt's {length} tokens the context of {limit} "
            f"has room for {room}",
            param="max_tokens",
        )
    return sampling.max_tokens if sampling.max_tokens is not None else room


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
