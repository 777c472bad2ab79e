"""Prepares a request before its first step: template, tokens, limits, pixels; then turns it into jobs.

There is one job per choice. The real and the simulated engine both use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fovea.core.errors import InvalidRequest, PromptTooLong
from fovea.core.measure import stage
from fovea.core.sampling import SamplingParams
from fovea.core.types import (
    ChatPrompt,
    GenerationRequest,
    ModelInfo,
    PlannedPrompt,
    Prompt,
    TextPrompt,
    check_prompt_media,
)
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.job import Job, PixelSource, SequenceInputs, Sink
from fovea.engine.keep import KEEP_ALL, KeepPolicy, KeepRule
from fovea.engine.request.answer import AnswerReader
from fovea.engine.request.pixels import PixelPool, PixelStore, PixelTask, Reservation
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.prompt_plan import PlannedImage, PreparedPrompt
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.request.work_queue import EXPENSIVE
from fovea.engine.sequence import Sequence
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan

if TYPE_CHECKING:
    from fovea.engine.grammar.compiler import Grammar
    from fovea.engine.tiers import SlowerTiers
    from fovea.engine.vision.encoding import VisualFeatures


FULL_STOP = "."
"""Text that an answer with a form follows, see `TextStream`."""


@dataclass(frozen=True, slots=True)
class RequestOutline:
    """A request whose prompt fits, before its videos are decoded.

    prompt: the prompt; pruned videos may be placeholders.
    max_tokens: length limit of each answer.
    tasks: the computations of the pixels, by image key.
    stored: keys of images whose encoder output is in a slower tier. They need no pixels if it can be read.
    seconds: time that building the outline took.
    bad_words: tokens that must not occur one after the other in an answer.
    prediction: tokens that an answer is likely to contain; (): nothing is known of it.
    """

    prompt: PreparedPrompt
    max_tokens: int
    tasks: dict[str, PixelTask]
    stored: frozenset[str]
    seconds: float
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A request whose pixels have room in memory.

    prompt: the whole prompt.
    tasks: the computations of the pixels, by image key.
    features: encoder outputs read from slower tiers, by image key. An output leaves when the runner moves it
        into the encoder-output cache; the rest is cleared when the reservation ends.
    needed_tasks: the tasks whose pixels have to be computed, each with the number of the first image that
        needs it; None for frames of a video.
    """

    prompt: PreparedPrompt
    tasks: dict[str, PixelTask]
    features: dict[str, VisualFeatures]
    needed_tasks: tuple[tuple[PixelTask, int | None], ...]


class Given(Protocol):
    """The results of peers for a request (`peers.client.Fetched`).

    features: encoder outputs, by key.
    """

    features: dict[str, VisualFeatures]

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the images that need no pixels."""
        ...


class Preparer:
    """Turns requests into jobs: prompt, room for pixels, outputs of slower tiers, pixels.

    builder: builds prompts.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        builder: PromptBuilder,
        pixels: PixelStore,
        embeddings: EmbeddingCache[VisualFeatures],
        slower: SlowerTiers,
        token_bytes: int,
        keep: KeepPolicy = KEEP_ALL,
    ) -> None:
        """token_bytes: bytes of encoder output per visual token. keep: which keys and values may be kept."""
        self._keep = keep
        self.builder = builder
        self._tokenizer = tokenizer
        self._pixels = pixels
        self._embeddings = embeddings
        self._slower = slower
        self._token_bytes = token_bytes

    def build(
        self, request: GenerationRequest, info: ModelInfo, load: float = 0.0, steps_down: int = 0
    ) -> RequestOutline:
        """Apply the template, tokenize and check limits. For a worker thread: it takes milliseconds.

        load: load of the engine, which may lower the detail level of images.
        steps_down: fewest steps by which the detail level of images is lowered if the request leaves it open.
        Raises RequestError for a request that cannot run.
        """
        started = time.monotonic()
        with stage("tokenize"):
            prompt, max_tokens = self.lay_out(request, info, load, steps_down)
            bad_words = bad_word_tokens(self._tokenizer, request.sampling.bad_words)
            prediction = self._tokenizer.encode_plain(request.prediction) if request.speculate else ()
        tasks = {planned.key: self._pixels.task(planned) for planned in prompt.planned_inputs}
        stored = self._slower.find(key for key in tasks if key not in self._embeddings)
        seconds = time.monotonic() - started
        return RequestOutline(prompt, max_tokens, tasks, stored, seconds, bad_words, tuple(prediction))

    def lay_out(
        self, request: GenerationRequest, info: ModelInfo, load: float = 0.0, steps_down: int = 0
    ) -> tuple[PreparedPrompt, int]:
        """Return the prompt, before its videos are decoded, and the length limit of each answer.

        The arguments are those of `build`. Raises RequestError for a request that cannot run.
        """
        check_prompt_media(info, request.prompt)
        most = self._keep.most_context(info.max_context, self._keep.rule(request.kv_keep))
        if most < info.max_context:
            info = replace(info, max_context=most)
        prompt = self.builder.outline(request.prompt, request.cache_salt, info.max_context, load, steps_down)
        if request.encode_only and isinstance(request.prompt, PlannedPrompt):
            max_tokens = 1  # of such a prompt, nothing is computed
        else:
            max_tokens = check_lengths(prompt, request.sampling, info, request.usual_tokens)
        check_token_ids(prompt, request.sampling, info.vocab_size, info.extra_embeddings)
        return prompt, max_tokens

    def missing_images(self, outline: RequestOutline) -> list[PlannedImage]:
        """Return the images whose encoder output no cache has, each once."""
        images = {image.key: image for image in outline.prompt.images if image.key not in outline.stored}
        return [image for key, image in images.items() if key not in self._embeddings]

    def reserve(self, outline: RequestOutline, given: frozenset[str] = frozenset()) -> Reservation:
        """Reserve memory for the pixels that the encoder will need, and for outputs in slower tiers.

        Images whose output is in the encoder-output cache need none. An unsettled video needs memory for its
        frames and for the pixels of all its groups.

        given: keys of images that peers have encoded or computed.
        """
        missing = [
            image
            for image in outline.prompt.planned_inputs
            if image.key not in self._embeddings and image.key not in given
        ]
        tasks = [outline.tasks[image.key] for image in missing if image.key not in outline.stored]
        outputs = sum(image.plan.rows for image in missing if image.key in outline.stored)
        videos = outline.prompt.unsettled_videos
        items = [item for task in tasks for item in task.items] + [video.clip for video in videos]
        pixels = sum(video.pixel_count for video in videos)
        extra = outputs * self._token_bytes + pixels * self._pixels.pixel_bytes
        slow = bool(outline.prompt.videos) or sum(task.cost for task in tasks) > EXPENSIVE
        return self._pixels.pool.reserve(items, extra, slow=slow)

    def reserve_frames(self, outline: PreparedPrompt) -> Reservation:
        """Reserve memory for the frames that `settle` decodes, and for nothing else."""
        return self._pixels.pool.reserve(video.clip for video in outline.unsettled_videos)

    def settle(self, outline: PreparedPrompt) -> Future[PreparedPrompt]:
        """Return a future of the whole prompt, for which videos are decoded.

        The reservation must be granted before.

        Raises Unavailable when the engine has stopped.
        """
        if outline.unsettled_videos:
            return self._pixels.run_with_videos(partial(self.builder.settle, outline))
        settled: Future[PreparedPrompt] = Future()
        settled.set_result(outline)
        return settled

    def read(
        self,
        outline: RequestOutline,
        prompt: PreparedPrompt,
        reservation: Reservation,
        given: Given | None = None,
    ) -> ReadyRequest:
        """Read outputs from slower tiers, and list the pixels that have to be computed. For a worker thread.

        prompt: the whole prompt.
        reservation: the request's memory. If an output can no longer be read, the image's pixels are reserved
            instead.
        given: what peers have done; None: nothing.
        """
        tasks = outline.tasks | {
            planned.key: self._pixels.task(planned)
            for planned in prompt.planned_inputs
            if planned.key not in outline.tasks
        }
        known = frozenset[str]() if given is None else given.keys
        missing = [
            planned
            for planned in prompt.planned_inputs
            if planned.key not in self._embeddings and planned.key not in known
        ]
        stored = outline.stored | self._slower.find(
            planned.key for planned in missing if planned.key not in outline.tasks
        )
        features: dict[str, VisualFeatures] = {} if given is None else dict(given.features)
        numbers = {image.key: number for number, image in reversed(list(enumerate(prompt.images)))}
        needed: dict[PixelTask, int | None] = {}
        for planned in missing:
            key = planned.key
            output = self._slower.get(key, planned.plan.rows) if key in stored else None
            if output is not None:
                features[key] = output
                continue
            needed.setdefault(tasks[key], numbers.get(key))
            for item in tasks[key].items:
                reservation.add(item, already_counted=key not in outline.tasks)
        return ReadyRequest(prompt, tasks, features, tuple(needed.items()))

    def offsets(self, prompt: Prompt, prepared: PreparedPrompt) -> Seq[int]:
        """Return the place of each token in the prompt's text; (): a conversation, which is not echoed."""
        if isinstance(prompt, ChatPrompt):
            return ()
        text = prompt.text if isinstance(prompt, TextPrompt) else None
        return self._tokenizer.offsets(prepared.ids, text)

    def jobs(
        self,
        request: GenerationRequest,
        outline: RequestOutline,
        ready: ReadyRequest,
        reservation: Reservation,
        sink: Sink,
        arrival: float,
        pixels_s: float,
        decode_s: float = 0.0,
        grammar: Grammar | None = None,
    ) -> list[Job]:
        """Return one job per choice, ready for the loop.

        arrival: time of arrival on the monotonic clock; deadlines count from it.
        pixels_s: seconds spent on the pixels.
        decode_s: the part of them that was spent on decoding images.
        grammar: what the answers must follow; None: nothing.
        """
        pixels: dict[str, PixelSource] = {
            planned.key: partial(_compute_pixels, ready.tasks[planned.key], planned.plan, reservation)
            for planned in ready.prompt.planned_inputs
        }
        return build_jobs(
            request,
            ready.prompt,
            outline.max_tokens,
            self._tokenizer,
            sink,
            arrival=arrival,
            preprocess_s=outline.seconds + pixels_s - decode_s,
            decode_s=decode_s,
            keep=self._keep.rule(request.kv_keep),
            inputs=lambda choice: SequenceInputs(
                choice,
                pixels,
                ready.features,
                grammar,
                outline.bad_words,
                self._reasoning_end(ready.prompt),
                outline.prediction,
            ),
        )

    @property
    def reasoning_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The tokens that begin the model's reasoning, and those that end it; None: it does not reason."""
        return self._tokenizer.reasoning_marks

    def _reasoning_end(self, prompt: PreparedPrompt) -> tuple[int, ...]:
        """Return the tokens that end the model's reasoning; (): the prompt does not end inside of it."""
        return self.reasoning_marks[1] if prompt.thinking and self.reasoning_marks else ()

    @property
    def pixel_bytes(self) -> int:
        """Estimated bytes of pixels, and of outputs read from slower tiers, that wait for their step."""
        return self._pixels.pool.stats().reserved_bytes

    @property
    def pixel_pool(self) -> PixelPool:
        """The memory for pixels, and their cache."""
        return self._pixels.pool

    def close(self) -> None:
        """Stop the threads that compute pixels. Computations that have not begun are cancelled."""
        self._pixels.close()


def build_jobs(
    request: GenerationRequest,
    prompt: PreparedPrompt,
    max_tokens: int,
    tokenizer: ChatTokenizer,
    sink: Sink,
    *,
    arrival: float,
    preprocess_s: float,
    decode_s: float = 0.0,
    keep: KeepRule | None = None,
    inputs: Callable[[int], SequenceInputs] = SequenceInputs,
) -> list[Job]:
    """Return one job per choice of the request.

    max_tokens: length limit of each answer.
    arrival: time of arrival on the monotonic clock; deadlines count from it.
    preprocess_s: seconds spent on template, tokens and pixels, without decoding images.
    decode_s: seconds spent on decoding images after arrival.
    keep: which keys and values are kept; None: all.
    inputs: returns the executor's inputs of a choice, by the choice's number.
    """
    sampling = request.sampling

    def before(inputs: SequenceInputs) -> Seq[int]:
        exact = inputs.grammar is not None and not inputs.grammar_after
        return tokenizer.encode_plain(FULL_STOP) if exact else ()

    return [
        Job(
            seq=to_sequence(request, prompt, max_tokens, arrival, choice, keep),
            inputs=own,
            sink=sink,
            reader=AnswerReader(tokenizer, sampling, before(own)),
            fetch_s=request.fetch_s,
            media_decode_s=request.media_decode_s,
            preprocess_s=preprocess_s,
            decode_s=decode_s,
        )
        for choice, own in enumerate(map(inputs, range(sampling.n)))
    ]


def to_sequence(
    request: GenerationRequest,
    prompt: PreparedPrompt,
    max_tokens: int,
    arrival: float,
    choice: int = 0,
    keep: KeepRule | None = None,
) -> Sequence:
    """Return the sequence of one choice of a request. The arguments are those of `build_jobs`."""
    return Sequence(
        id=f"{request.id}:{choice}",
        prompt_ids=prompt.ids,
        sampling=request.sampling,
        max_tokens=max_tokens,
        spans=prompt.spans,
        salt=request.cache_salt,
        keep=keep,
        speculate=request.speculate,
        client=request.client,
        arrival=arrival,
        deadline=None if request.timeout is None else arrival + request.timeout,
        priority=request.priority,
        encode_only=request.encode_only,
        scores_prompt=request.sampling.prompt_logprobs is not None and choice == 0,
    )


def _compute_pixels(task: PixelTask, plan: VisualPlan, reservation: Reservation) -> ProcessedImage:
    """Return the pixels with this request's plan.

    If their memory was not reserved because a cache had the output, and the cache has lost it, it is reserved
    now.
    """
    for item in task.items:
        reservation.add(item)
    return replace(task(), plan=plan)


def check_lengths(
    prepared: PreparedPrompt, sampling: SamplingParams, info: ModelInfo, usual_tokens: int | None = None
) -> int:
    """Check that prompt and answer fit into the context, and return the length limit of the answer in tokens.

    usual_tokens: length limit of an answer whose request names none; None: as much as fits.
    Raises PromptTooLong, with the numbers, if prompt and answer do not fit into the context.
    """
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
            f"max_tokens is {sampling.max_tokens}, but after the prompt's {length} tokens "
            f"the context of {limit} has room for {room}",
            param="max_tokens",
        )
    return sampling.max_tokens if sampling.max_tokens is not None else min(room, usual_tokens or room)


def bad_word_tokens(tokenizer: ChatTokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word as it is, and of each after a space, as within a sentence."""
    forms = (tuple(tokenizer.encode_plain(space + word)) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(form for form in forms if form))


def check_token_ids(prepared: PreparedPrompt, sampling: SamplingParams, size: int, extra: int = 0) -> None:
    """Refuse ids outside the model's embeddings, because some tokenizers have more tokens than their model.

    size: number of tokens that the model can choose.
    extra: embeddings after those, which only prompts can hold.
    Raises InvalidRequest.
    """
    if max(prepared.ids) >= size + extra:
        raise InvalidRequest(
            f"token {max(prepared.ids)} of the prompt is outside [0, {size + extra})", param="prompt"
        )
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        for token in getattr(sampling, name):
            if not 0 <= token < size:
                raise InvalidRequest(f"{name}: token {token} is outside [0, {size})", param=name)
