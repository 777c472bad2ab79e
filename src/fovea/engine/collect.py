"""Events of a request, put together: as deltas with the bill at the end, or as one answer."""

from __future__ import annotations

from collections.abc import Iterable

from fovea.core.types import Completion, Delta, FinishReason, StageTimings, TokenLogprob, Usage
from fovea.engine.events import Event
from fovea.engine.prompt import PreparedPrompt


class AnswerState:
    """Counts what a request used while its events pass through."""

    def __init__(self, prepared: PreparedPrompt, choices: int) -> None:
        self._prompt = len(prepared.ids)
        self._image = prepared.image_tokens
        self._open = choices
        self._completion = 0
        self._cached = 0

    @property
    def done(self) -> bool:
        return self._open == 0

    def take(self, event: Event) -> Delta:
        """The delta of an event; raises the event's error."""
        if event.error is not None:
            raise event.error
        self._completion += len(event.token_ids)
        if event.choice == 0:
            self._cached = event.cached_tokens
        usage = timings = None
        if event.finish_reason is not None:
            self._open -= 1
            if self.done:
                usage = Usage(self._prompt, self._completion, self._cached, self._image)
                timings = event.timings
        return Delta(
            event.choice, event.text, event.token_ids, event.logprobs, event.finish_reason, usage, timings
        )


def collect(deltas: Iterable[Delta], choices: int) -> Completion:
    texts = [""] * choices
    ids: list[list[int]] = [[] for _ in range(choices)]
    logprobs: list[list[TokenLogprob]] = [[] for _ in range(choices)]
    reasons: list[FinishReason] = ["abort"] * choices
    usage, timings = Usage(), StageTimings()
    for delta in deltas:
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        logprobs[delta.index] += delta.logprobs
        reasons[delta.index] = delta.finish_reason or reasons[delta.index]
        usage, timings = delta.usage or usage, delta.timings or timings
    return Completion(
        tuple(texts),
        tuple(tuple(i) for i in ids),
        tuple(reasons),
        tuple(tuple(entries) for entries in logprobs),
        usage,
        timings,
    )
