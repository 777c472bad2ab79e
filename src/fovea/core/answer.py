"""Assembly of a request's deltas into one answer."""

from __future__ import annotations

from fovea.core.image import ImageUse
from fovea.core.types import (
    Completion,
    Delta,
    FinishReason,
    PromptLogprobs,
    StageTimings,
    TokenLogprob,
    Usage,
)


class AnswerBuilder:
    """Assembles the deltas of one request, in any interleaving of its choices, into a `Completion`.

    choices: number of choices of the request.
    A choice without a finish reason gets the reason "abort".
    """

    def __init__(self, choices: int) -> None:
        self._texts = [""] * choices
        self._ids: list[list[int]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
        self._reasons: list[FinishReason] = ["abort"] * choices
        self._usage = Usage()
        self._timings = StageTimings()
        self._images: tuple[ImageUse, ...] = ()
        self._thinking = False
        self._prompt_ids: tuple[int, ...] = ()
        self._prompt_logprobs: PromptLogprobs = ()
        self._stops: list[str | int | None] = [None] * choices

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._ids[delta.index] += delta.token_ids
        self._logprobs[delta.index] += delta.logprobs
        self._reasons[delta.index] = delta.finish_reason or self._reasons[delta.index]
        self._usage = delta.usage or self._usage
        self._timings = delta.timings or self._timings
        self._images = delta.images or self._images
        self._thinking = delta.thinking
        self._prompt_ids = delta.prompt_ids or self._prompt_ids
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        if delta.stop is not None:
            self._stops[delta.index] = delta.stop

    def build(self) -> Completion:
        return Completion(
            tuple(self._texts),
            tuple(map(tuple, self._ids)),
            tuple(self._reasons),
            tuple(map(tuple, self._logprobs)),
            self._usage,
            self._timings,
            self._images,
            self._thinking,
            tuple(self._stops),
            self._prompt_ids,
            self._prompt_logprobs,
        )
