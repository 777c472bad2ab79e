"""How many of its images' visual tokens a request gets, and who chooses them: from its wish, or the engine's policy.

The number follows from shape and ratio alone, so a prompt's length is known before a pixel is seen; only where nobody says a
number, and relevance is to find one, or where images share a budget (`viewing.py`), pixels are looked at first. What changes which tokens there are (method, number, and
for some the question) is in the key of the image, and so in that of its KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.image import Image, PixelBudget, VisualTokens
from fovea.core.types import ImagePart
from fovea.engine.vision.processor.base import ImageProcessor, Reduction, VisualPlan
from fovea.engine.vision.processor.idefics3 import Idefics3Processor
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.processor.regions import fewest_tokens, own_tokens, takes_parts
from fovea.engine.visual_budget.methods import METHODS, PARAM, Method, keep_count, settled
from fovea.engine.visual_budget.views import View, shown, shrunk
from fovea.relevance.naming import Turn, last_mentions

QWEN = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL"
SMALLER = "resize", "views"
"""Of `Method.after`: pictures are made smaller."""
WORDS = 64
"""Of the question's ids, the last, are looked at."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says beside its images. question: all that the user says, and turn by turn."""

    question: str
    salt: str
    load: float
    turns: tuple[Turn, ...] = ()

    def key(self, image: Image, plan: VisualPlan) -> str:
        return f"{self.salt}\x00{image.identity}\x00{plan.key}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan with fewer tokens, its key, and the method's name."""

    plan: VisualPlan
    key: str
    method: str


class Reducing:
    """visual: the engine's policy for images whose request has no wish; None: all tokens."""

    def __init__(
        self,
        processor: ImageProcessor,
        encode: Callable[[str], list[int]],
        visual: VisualTokens | None,
        learned: str = "",
    ) -> None:
        """learned: names what was trained for this model's relevance; part of the key, as others choose otherwise.

        Raises ConfigError for a policy that this model's images cannot follow."""
        self._processor = processor
        self._encode = encode
        self._accepted = accepted(processor)
        self._visual = None if visual is None else settled(visual, self._accepted)
        self._learned = learned
        if self._visual is not None:
            self.allow("visual_tokens", self._visual.method)

    def allow(self, setting: str, name: str) -> None:
        """Raises ConfigError for a setting that names a method which this model's images cannot follow: it would refuse
        requests for what they did not ask for."""
        refusal = _refusal(self._processor, name)
        if refusal is not None:
            raise ConfigError(f"{setting}: {refusal}", param=setting)

    def choose(
        self, pictures: Sequence[ImagePart], plans: Sequence[VisualPlan], asked: Asked
    ) -> list[Chosen | None]:
        """What becomes of each of a request's images. plans: with all tokens. None: all of them stay. Raises InvalidRequest.

        Images that wish for views by the same numbers share one budget.
        """
        found = [
            self.plan(part.image, plan, part.budget, asked)
            for part, plan in zip(pictures, plans, strict=True)
        ]
        groups: dict[tuple[float | None, int | None], list[int]] = {}
        for number, part in enumerate(pictures):
            wish = self._wish(part.budget)
            if wish is not None and METHODS[wish.method].after == "views":
                groups.setdefault((wish.keep, wish.budget), []).append(number)
        named = last_mentions(asked.turns, len(pictures)) if groups else []
        for (keep, budget), numbers in groups.items():
            views = [
                View(pictures[number].image, plans[number], pictures[number].budget, named[number])
                for number in numbers
            ]
            for number, chosen in zip(numbers, self._views(views, keep, budget, asked), strict=True):
                found[number] = chosen
        return found

    def plan(self, image: Image, plan: VisualPlan, budget: PixelBudget, asked: Asked) -> Chosen | None:
        """The same of one image by itself, of which views leave nothing out."""
        wish = self._wish(budget)
        if wish is None or METHODS[wish.method].after == "views":
            return None
        known = METHODS[wish.method]
        keep = self._count(image, plan, wish)
        if budget.visual is None and known.in_parts:
            keep = max(keep, fewest_tokens(self._processor))  # nobody asked for less than the model can
        if keep >= plan.tokens:
            return None
        refusal = _refusal(self._processor, known.name)
        if refusal is not None:
            raise InvalidRequest(f"{PARAM}: {refusal}", param=PARAM)
        if known.after == "resize":
            smaller = self._resized(plan, budget, keep)
            return None if smaller is None else Chosen(smaller, asked.key(image, smaller), known.name)
        self._check_fewest(plan, known, keep)
        words = known.query_aware and asked.question.strip()
        load = round(4 * min(1.0, asked.load)) / 4 if known.in_parts else 0.0
        marks = [plan.key, known.name, str(keep)]
        if known.in_parts:
            marks += [f"load={load}", self._learned]
        if words:
            marks.append(hashlib.sha256(asked.question.encode()).hexdigest())
        key = f"{asked.salt}\x00{image.identity}\x00{';'.join(marks)}"
        reduction = Reduction(
            known.name,
            plan.tokens,
            asked.key(image, plan),
            key,
            salt=asked.salt,
            question=asked.question if words else "",
            words=tuple(self._encode(asked.question)[-WORDS:]) if words else (),
            load=load,
        )
        marker = plan.text[: len(plan.text) // plan.tokens]
        reduced = replace(plan, tokens=keep, text=marker * keep, key=";".join(marks), reduction=reduction)
        return Chosen(reduced, key, known.name)

    def _wish(self, budget: PixelBudget) -> VisualTokens | None:
        """A method's name and numbers; None: all tokens. Raises InvalidRequest."""
        return self._visual if budget.visual is None else settled(budget.visual, self._accepted)

    def _views(
        self, views: Sequence[View], keep: float | None, budget: int | None, asked: Asked
    ) -> list[Chosen | None]:
        """Of images that share a budget; a share is a token for each at least."""
        full, least = sum(view.plan.tokens for view in views), len(views)
        total = max(least, keep_count(full, 0.5 if keep is None else keep)) if budget is None else budget
        if least == 1 or total >= full:
            return [None] * least
        name = "views"
        refusal = _refusal(self._processor, name)
        if refusal is not None:
            raise InvalidRequest(f"{PARAM}: {refusal}", param=PARAM)
        if total < least:
            raise InvalidRequest(
                f"{PARAM}: {total} tokens for {least} images, of which {name} shows each; accepted: {least} or more",
                param=PARAM,
            )
        assert isinstance(self._processor, QwenProcessor)
        plans = shown(self._processor, views, asked.question, total)
        return [
            None if plan.tokens == view.plan.tokens else Chosen(plan, asked.key(view.image, plan), name)
            for view, plan in zip(views, plans, strict=True)
        ]

    def _resized(self, plan: VisualPlan, budget: PixelBudget, keep: int) -> VisualPlan | None:
        """The largest plan of at most `keep` tokens; None: there is no smaller one."""
        assert isinstance(self._processor, QwenProcessor)
        smaller = shrunk(self._processor, plan, budget, keep)
        return smaller if smaller.tokens < plan.tokens else None

    def _check_fewest(self, plan: VisualPlan, known: Method, keep: int) -> None:
        fewest = fewest_tokens(self._processor)
        if known.in_parts and keep < fewest:
            raise InvalidRequest(
                f"{PARAM}: {keep} of {plan.tokens} tokens; this model's view of the whole image has {fewest - 1}, which "
                f"{known.name} always keeps, so {fewest} or more are accepted",
                param=PARAM,
            )

    def _count(self, image: Image, plan: VisualPlan, wish: VisualTokens) -> int:
        if wish.budget is not None:
            return min(plan.tokens, wish.budget)
        if wish.keep is None and METHODS[wish.method].in_parts and takes_parts(self._processor):
            return min(plan.tokens, own_tokens(self._processor, image, plan))
        return keep_count(plan.tokens, 0.5 if wish.keep is None else wish.keep)


def accepted(processor: ImageProcessor) -> tuple[str, ...]:
    """Methods for images that this processor prepares."""
    if isinstance(processor, Idefics3Processor):
        return ()
    if isinstance(processor, QwenProcessor):
        return tuple(
            name for name, known in METHODS.items() if processor.resizes or known.after not in SMALLER
        )
    return tuple(
        name
        for name, known in METHODS.items()
        if (known.after == "encoder" and not _looks_into_encoder(known))
        or (known.in_parts and takes_parts(processor))
    )


def _looks_into_encoder(known: Method) -> bool:
    return bool(known.needs & {"attention", "keys"})


def _refusal(processor: ImageProcessor, name: str) -> str | None:
    """Why a model's images cannot be reduced so; None: they can."""
    names, known = accepted(processor), METHODS[name]
    if name in names:
        return None
    if not names:
        return "this model writes text between the tiles of an image, which cannot be left out; accepted: all tokens"
    if known.after in SMALLER:
        why = "this model's images have fixed sizes and cannot be made smaller"
    elif _looks_into_encoder(known):
        why = f"{name} looks into the vision encoder of {QWEN}"
    else:
        why = f"{name} is for models whose images can be seen in parts ({QWEN}, LLaVA-NeXT)"
    return f"{why}; accepted: {', '.join(names)}"
