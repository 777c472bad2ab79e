"""Events of a request as deltas, with the bill at the end."""

from __future__ import annotations

from fovea.core.errors import Unavailable
from fovea.core.types import Delta, Usage
from fovea.engine.events import Event
from fovea.engine.prompt import PreparedPrompt


class AnswerState:
    """Counts what a request used while its events pass through."""

    def __init__(self, prepared: PreparedPrompt, choices: int) -> None:
        self._prompt = len(prepared.ids)
        self._image = prepared.image_tokens
        self._seen = tuple(image.seen for image in prepared.images)
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
        if event.finish_reason == "abort":
            # Whoever cancels does not read on, so this is the engine's own end.
            raise Unavailable("the engine is shutting down")
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
            event.choice,
            event.text,
            event.token_ids,
            event.logprobs,
            event.finish_reason,
            usage,
            timings,
            self._seen if self.done else (),
        )
