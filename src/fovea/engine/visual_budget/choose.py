"""Decides how many visual tokens each image of a request gets, and by which method.

The request names method and number; if it does not, the configuration does.

The number follows from shape and ratio alone, so a prompt's length is known before any pixel is read. There
are two exceptions, in which question and pixels decide: relevance with the budget `auto`, and images that
share a budget (`views`). Everything that changes which tokens an image has (method, number, for some methods
the question) is part of the image's key, and so of the key of its KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.media import AUTO, Image, PixelBudget, VisualTokens
from fovea.core.types import ImagePart
from fovea.engine.vision.processor.base import (
    Capabilities,
    ImageProcessor,
    LookPrompt,
    Reduction,
    ResizingProcessor,
    VisualPlan,
)
from fovea.engine.vision.processor.regions import survey_coarsely
from fovea.engine.visual_budget.methods import METHODS, PARAM, Method, keep_count, resolve_preset
from fovea.relevance.images import GLANCES, Sizes, Turn, allot, last_mentions, rank, score_view

QUESTION_IDS = 64
"""Most token ids of a question that methods read, from its end."""


MakeLookPrompt = Callable[[Image, VisualPlan, str], LookPrompt | None]
"""Maps an image, its plan with all tokens and a question to the prompts of a look; None: no look."""


def _no_look(image: Image, plan: VisualPlan, question: str) -> LookPrompt | None:
    return None


class VisualBudget:
    """Plans the visual tokens of one model's images."""

    def __init__(
        self,
        processor: ImageProcessor,
        encode: Callable[[str], list[int]],
        visual: VisualTokens | None,
        relevance_digest: str = "",
        look_prompt: MakeLookPrompt = _no_look,
    ) -> None:
        """Raises ConfigError if `visual` names a method that this model's images do not support.

        encode: maps a text to token ids.
        visual: the method for images whose request names none; None: they keep all tokens.
        relevance_digest: digest of the choice of heads that look. It is part of the keys, because other heads
            choose other tokens.
        look_prompt: writes the prompts with which the model looks for what a question is about.
        """
        self._capabilities = processor.capabilities
        self._encode = encode
        self._methods = possible_methods(self._capabilities)
        self._visual = None if visual is None else resolve_preset(visual, self._methods)
        self._relevance_digest = relevance_digest
        self._look_prompt = look_prompt
        if self._visual is not None:
            self.check_setting("visual_tokens", self._visual.method)

    def check_setting(self, setting: str, method: str) -> None:
        """Raise ConfigError if a setting names a method that this model's images do not support.

        Otherwise requests would be refused because of a method that they do not name.
        """
        refusal = _refusal(self._capabilities, self._methods, method)
        if refusal is not None:
            raise ConfigError(f"{setting}: {refusal}", param=setting)

    def check_wish(self, wish: VisualTokens) -> None:
        """Check a request's wish without an image.

        Raises InvalidRequest for an unknown method, for numbers beside a preset, and for a method that this
        model's images do not support, unless the wish may keep all tokens of an image.
        """
        resolved = resolve_preset(wish, self._methods)
        if resolved is None or resolved.budget is not None or resolved.keep == 1:
            return
        refusal = _refusal(self._capabilities, self._methods, resolved.method)
        if refusal is not None and METHODS[resolved.method].kind != "views":
            raise InvalidRequest(f"{PARAM}: {refusal}", param=f"{PARAM}.method")

    def reduce_all(
        self, pictures: Sequence[ImagePart], plans: Sequence[VisualPlan], context: RequestContext
    ) -> list[ReducedPlan | None]:
        """Plan all images of a request. Images with method `views` and the same numbers share one budget.

        plans: plans with all tokens, in the order of `pictures`.

        Returns None for an image that keeps all tokens. Raises InvalidRequest.
        """
        reduced = [
            self.reduce(part.image, plan, part.budget, context)
            for part, plan in zip(pictures, plans, strict=True)
        ]
        groups: dict[tuple[float | None, int | None], list[int]] = {}
        for number, part in enumerate(pictures):
            wish = self._wish(part.budget)
            if wish is not None and METHODS[wish.method].kind == "views":
                groups.setdefault((wish.share, wish.budget), []).append(number)
        mentions = last_mentions(context.turns, len(pictures)) if groups else []
        for (keep, budget), numbers in groups.items():
            images = [
                SharingImage(pictures[number].image, plans[number], pictures[number].budget, mentions[number])
                for number in numbers
            ]
            for number, plan in zip(numbers, self._share(images, keep, budget, context), strict=True):
                reduced[number] = plan
        return reduced

    def reduce(
        self, image: Image, plan: VisualPlan, budget: PixelBudget, context: RequestContext
    ) -> ReducedPlan | None:
        """Plan one image without the others of its request; for the method `views` it keeps all tokens.

        Returns None if the image keeps all tokens. Raises InvalidRequest.
        """
        wish = self._wish(budget)
        if wish is None or METHODS[wish.method].kind == "views":
            return None
        method = METHODS[wish.method]
        keep = self._count_tokens(image, plan, wish, context.last_question)
        regions = self._capabilities.regions
        from_operator = budget.visual is None or wish.from_operator
        if from_operator and method.by_region and regions is not None:
            keep = max(keep, regions.fewest_tokens)
        if keep >= plan.tokens:
            return None
        refusal = _refusal(self._capabilities, self._methods, method.name)
        if refusal is not None:
            raise InvalidRequest(f"{PARAM}: {refusal}", param=f"{PARAM}.method")
        if method.kind == "resize":
            return self._plan_smaller(image, plan, budget, keep, context)
        self._check_fewest(plan, method, keep)
        return self._add_reduction(image, plan, method, keep, context)

    def _add_reduction(
        self, image: Image, plan: VisualPlan, method: Method, keep: int, context: RequestContext
    ) -> ReducedPlan:
        """The plan with `keep` tokens, and with a `Reduction` that tells the encoder how to choose them."""
        words = method.query_aware and context.question.strip()
        load = round(4 * min(1.0, context.load)) / 4 if method.by_region else 0.0
        marks = [plan.key, method.name, str(keep)]
        if method.by_region:
            marks += [f"load={load}", self._relevance_digest]
        if words:
            marks.append(hashlib.sha256(context.question.encode()).hexdigest())
        look = None
        if words and method.by_region:
            look = self._look_prompt(image, plan, context.question)
            # The chat template and the tokenizer decide about the look, and so about the tokens.
            marks.append(hashlib.sha256(repr(look).encode()).hexdigest())
        key = f"{context.salt}\x00{image.identity}\x00{';'.join(marks)}"
        reduction = Reduction(
            method.name,
            plan.tokens,
            context.key(image, plan),
            key,
            salt=context.salt,
            question=context.last_question if words and method.by_region else "",
            word_ids=()
            if method.by_region or not words
            else tuple(self._encode(context.question)[-QUESTION_IDS:]),
            load=load,
            look=look,
        )
        text = plan.text_of(keep)
        reduced = replace(plan, tokens=keep, text=text, key=";".join(marks), reduction=reduction)
        return ReducedPlan(reduced, key, method.name)

    def _wish(self, budget: PixelBudget) -> VisualTokens | None:
        """Method and numbers of the request, or of the configuration if the request has none.

        Returns None if all tokens are kept. Raises InvalidRequest.
        """
        return self._visual if budget.visual is None else resolve_preset(budget.visual, self._methods)

    def _share(
        self, images: Sequence[SharingImage], keep: float | None, budget: int | None, context: RequestContext
    ) -> list[ReducedPlan | None]:
        """Plan images that share a budget. If it is a share (`keep`), it is at least one token per image."""
        full, least = sum(entry.plan.tokens for entry in images), len(images)
        total = max(least, keep_count(full, 0.5 if keep is None else keep)) if budget is None else budget
        if least == 1 or total >= full:
            return [None] * least
        name = "views"
        refusal = _refusal(self._capabilities, self._methods, name)
        if refusal is not None:
            raise InvalidRequest(f"{PARAM}: {refusal}", param=f"{PARAM}.method")
        if total < least:
            raise InvalidRequest(
                f"{PARAM}: {total} tokens for {least} images; {name} gives each image a token or more; "
                f"accepted: {least} or more",
                param=PARAM,
            )
        assert self._capabilities.resize is not None
        plans = share_budget(self._capabilities.resize, images, context.question, total)
        return [
            None
            if plan.tokens == entry.plan.tokens
            else ReducedPlan(plan, context.key(entry.image, plan), name)
            for entry, plan in zip(images, plans, strict=True)
        ]

    def _plan_smaller(
        self, image: Image, plan: VisualPlan, budget: PixelBudget, keep: int, context: RequestContext
    ) -> ReducedPlan | None:
        """The largest plan of at most `keep` tokens. None: no plan is smaller than this one."""
        assert self._capabilities.resize is not None
        smaller = self._capabilities.resize.shrink(plan, budget, keep)
        if smaller.tokens >= plan.tokens:
            return None
        return ReducedPlan(smaller, context.key(image, smaller), "resize")

    def _check_fewest(self, plan: VisualPlan, method: Method, keep: int) -> None:
        regions = self._capabilities.regions
        if method.by_region and regions is not None and keep < regions.fewest_tokens:
            fewest = regions.fewest_tokens
            raise InvalidRequest(
                f"{PARAM}: {keep} of {plan.tokens} tokens; this model's view of the whole image has "
                f"{fewest - 1}, which {method.name} always keeps; accepted: {fewest} or more",
                param=PARAM,
            )

    def _count_tokens(self, image: Image, plan: VisualPlan, wish: VisualTokens, question: str) -> int:
        regions = self._capabilities.regions
        if wish.budget is not None:
            return min(plan.tokens, wish.budget)
        most = keep_count(plan.tokens, wish.at_most)
        if METHODS[wish.method].by_region and regions is not None and wish.keep in (None, AUTO):
            return min(most, regions.enough_tokens(image, plan, question))
        return min(most, keep_count(plan.tokens, wish.share or 0.5))


@dataclass(frozen=True, slots=True)
class SharingImage:
    """One of the images that share a budget.

    plan: the plan with all tokens.
    budget: the pixel budget that the plan was made with.
    mention: number of the last turn that names the image; -1: no turn does.
    """

    image: Image
    plan: VisualPlan
    budget: PixelBudget
    mention: int


def share_budget(
    processor: ResizingProcessor, images: Sequence[SharingImage], question: str, total: int
) -> list[VisualPlan]:
    """Return a plan for each image: at most `total` tokens together, and at least one token each.

    Some images are encoded closely, the others as glances. Each image keeps its own plan, or gets a
    smaller plan of the same processor with the key of that plan. So an image that keeps its plan has the
    same cache entries as in any other request.

    Images that the user named last are encoded closely first, then those whose content fits the question
    best. CPU-bound, some milliseconds per image.
    """
    scores = [score_view(survey_coarsely(processor, entry.image, entry.plan), question) for entry in images]
    mentions = [entry.mention for entry in images]
    order = rank(mentions, scores, [entry.image.identity for entry in images])
    glances = [
        tuple(processor.shrink(entry.plan, entry.budget, most) for most in GLANCES) for entry in images
    ]
    sizes = [
        Sizes(entry.plan.tokens, tuple(plan.tokens for plan in plans))
        for entry, plans in zip(images, glances, strict=True)
    ]
    close_count = mentions.count(max(mentions)) if max(mentions) >= 0 else 1
    allotment = allot(sizes, order, close_count, total)
    plans = [plans[allotment.glance] for plans in glances]
    for number, most in allotment.close.items():
        closer = processor.shrink(images[number].plan, images[number].budget, most)
        plans[number] = max(plans[number], closer, key=lambda plan: plan.tokens)
    return plans


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts of a request that decide about visual tokens, apart from its images.

    question: the user's text of all turns.
    salt: the request's cache salt.
    load: the engine's load, 0 or more.
    turns: the user's turns.
    """

    question: str
    salt: str
    load: float
    turns: tuple[Turn, ...] = ()

    @property
    def last_question(self) -> str:
        """The user's text of the last turn that has any."""
        texts = [text for text, _ in self.turns if text.strip()]
        return texts[-1] if texts else self.question

    def key(self, image: Image, plan: VisualPlan) -> str:
        """The key of an image with this plan in the encoder-output cache."""
        return f"{self.salt}\x00{image.identity}\x00{plan.key}"


@dataclass(frozen=True, slots=True)
class ReducedPlan:
    """A plan with fewer tokens, its cache key, and the name of the method."""

    plan: VisualPlan
    key: str
    method: str


def possible_methods(capabilities: Capabilities) -> tuple[str, ...]:
    """Names of the methods that images with these capabilities support, in the order of `METHODS`."""
    return tuple(name for name, method in METHODS.items() if _is_possible(method, capabilities))


def _is_possible(method: Method, can: Capabilities) -> bool:
    if not can.droppable:
        return False
    if method.makes_smaller:
        return can.resize is not None
    if method.by_region:
        return can.regions is not None
    if "probe" in method.needs:
        return can.decoder_probe
    return can.encoder_taps or not method.looks_into_encoder


def _refusal(can: Capabilities, possible: tuple[str, ...], name: str) -> str | None:
    """Why a model's images do not support the method, for an error message; None: they support it."""
    if name in possible:
        return None
    if not can.images:
        return "this model takes no images, so it has no visual tokens; accepted: all tokens"
    if not possible:
        return (
            "this model writes text between the tiles or rows; tokens of such an image cannot be left out; "
            "accepted: all tokens"
        )
    method = METHODS[name]
    if method.makes_smaller:
        why = "this model's images have fixed sizes and cannot be made smaller"
    elif "probe" in method.needs:
        why = f"{name} needs the attention of the decoder's first layers, which this model does not have"
    elif method.looks_into_encoder:
        why = f"{name} needs the attention inside the vision encoder, which this model does not provide"
    else:
        why = f"{name} encodes images region by region, which this model does not support"
    return f"{why}; accepted: {', '.join(possible)} (docs/models.md has the models)"
