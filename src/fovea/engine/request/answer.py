"""Events of a request as deltas, with the bill at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fovea.core.errors import Unavailable
from fovea.core.image import ImageUse, RelevanceRecord
from fovea.core.types import Delta, Usage
from fovea.engine.events import Event
from fovea.engine.request.prompt_plan import PlannedImage, PreparedPrompt
from fovea.relevance.pipeline import Realization


class AnswerState:
    """Counts what a request used while its events pass through."""

    def __init__(
        self,
        prepared: PreparedPrompt,
        choices: int,
        realized: Callable[[str], Realization | None] = lambda key: None,
    ) -> None:
        """realized: what was seen where of an image, by its key, if that is known."""
        self._images = prepared.images
        self._realized = realized
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
            tuple(map(self._seen, self._images)) if self.done else (),
        )

    def _seen(self, image: PlannedImage) -> ImageUse:
        found = None if image.chosen is None else self._realized(image.key)
        if found is None:
            return image.seen
        wish = image.budget.visual
        explained = found.explanation() if wish is not None and wish.explain else None
        return replace(image.seen, record=_looked(found), relevance=explained)


def _looked(found: Realization) -> RelevanceRecord:
    attended, tensions = found.allocation, found.tensions
    maps = found.ways.propositional, found.ways.perspectival, found.ways.participatory
    propositional, perspectival, participatory = (float(values.mean()) for values in maps)
    return RelevanceRecord(
        tuple(zip(attended.scores, attended.budgets, strict=True)),
        (tensions.compress, tensions.exploit, tensions.focus),
        (propositional, perspectival, participatory),
        found.seconds,
    )
