"""Builds a prompt for the decoder: token ids, and the spans that stand for images and video frames.

The processors' plans tell how many visual tokens an image or a video becomes before any pixel is read, so a
prompt that cannot fit is refused from the headers alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidRequest, InvalidVideo, PromptTooLong
from fovea.core.media import Image, PixelBudget, VisualTokens
from fovea.core.types import (
    ChatPrompt,
    ImagePart,
    Message,
    PlannedPrompt,
    Prompt,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoPart,
)
from fovea.engine.request.plans import read_plan
from fovea.engine.request.prompt_plan import Clips, PlannedImage, PlannedVideo, PreparedPrompt, unplaced_spans
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.processor.base import ImageProcessor, LookPrompt, VisualPlan
from fovea.engine.vision.processor.video import KeptCells, QwenVideos
from fovea.engine.visual_budget.choose import RequestContext, VisualBudget
from fovea.engine.visual_budget.detail import DetailRule, FullDetail, asks_for_text
from fovea.engine.visual_budget.methods import METHODS
from fovea.relevance.images import Turn

log = logging.getLogger("fovea.engine")

BRIEFLY = "Answer briefly."
"""Follows the question of a look: a model that is about to begin a sentence attends to its words, and not to
the image."""
NEUTRAL = "Describe the image."
"""The request that a look compares a question with."""
NO_IMAGE = Image("", 1, 1, bytes(3))
"""Stands for the image of a look in the chat template, which reads no pixels."""
LOOK_TURNS = 64
"""Number of recent looks whose prompts are remembered: the images of a request share them."""
LOOK_CHARACTERS = 2000
"""Most characters of a question that a look reads, from its end."""


class PromptBuilder:
    """Turns a core `Prompt` into token ids, spans and planned images.

    tokenizer: tokenizer and chat template.
    processor: plans images.
    image_token_id: the id that stands for one visual token of an image; None: the model takes no images.
    videos: (planner of videos, token id of a video's visual token); None: the model takes no videos.
    video_models: names of models that take videos, for the error message of one that takes none.
    detail: the rule for `detail: auto`; None: the model's own resolution.
    visual: how many visual tokens images keep whose request does not say it; None: all.
    relevance_digest: digest of the choice of heads that look, see `VisualBudget`.
    special_tokens_in_text: control tokens in the text of messages are control tokens, not text.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        processor: ImageProcessor,
        image_token_id: int | None,
        videos: tuple[QwenVideos, int] | None = None,
        video_models: str = "",
        detail: DetailRule | None = None,
        visual: VisualTokens | None = None,
        relevance_digest: str = "",
        special_tokens_in_text: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._seals_messages = not special_tokens_in_text
        self.processor = processor
        self._video_models = video_models
        self.detail = detail or DetailRule(FullDetail())
        self._visual_budget = VisualBudget(
            processor, tokenizer.encode, visual, relevance_digest, self.look_prompt
        )
        if self.detail.degrade_from and self.detail.degrade_by != "detail":
            self._visual_budget.check_setting("degrade_by", self.detail.degrade_by)
        self._one_turn = lru_cache(LOOK_TURNS)(self._write_turn)
        self._videos = videos[0] if videos else None
        self._clips = Clips()
        images = () if image_token_id is None else (image_token_id,)
        self._tokens = (*images, *((videos[1],) if videos else ()))
        self._markers = tuple(tokenizer.token_text(token) for token in self._tokens)
        self._sealed_markers = tuple(map(tokenizer.seal, self._markers))

    def build(
        self, prompt: Prompt, salt: str = "", limit: int | None = None, load: float = 0.0, steps_down: int = 0
    ) -> PreparedPrompt:
        """Build the whole prompt: `outline`, then `settle`."""
        return self.settle(self.outline(prompt, salt, limit, load, steps_down))

    def outline(
        self, prompt: Prompt, salt: str = "", limit: int | None = None, load: float = 0.0, steps_down: int = 0
    ) -> PreparedPrompt:
        """Build the prompt without decoding videos.

        A pruned video whose kept cells are not known yet gets placeholders: the right number of tokens, in
        other groups.

        salt: the request's cache salt, part of every key.
        limit: tokens of the context. Text that is too long by its number of characters is refused before it
            is tokenized, because tokenizing megabytes takes seconds.
        load: load of the engine, for the rule that chooses the level of `auto`.
        steps_down: fewest steps by which that rule lowers the level of `auto`.
        Raises InvalidRequest when images and markers do not match, or a budget cannot be met; PromptTooLong
        when text or videos cannot fit.
        """
        if isinstance(prompt, TokenPrompt):
            return self._from_ids(prompt)
        if isinstance(prompt, PlannedPrompt):
            return self._from_plans(prompt, salt)
        parts: list[ImagePart | VideoPart]
        if isinstance(prompt, ChatPrompt):
            parts = [p for m in prompt.messages for p in m.parts if isinstance(p, ImagePart | VideoPart)]
            self._check_videos(parts)
            if prompt.visual is not None:
                self._visual_budget.check_wish(prompt.visual)
            render = self.tokenizer.render_sealed if self._seals_messages else self.tokenizer.render
            text = render(prompt.messages, prompt.template)
        else:
            text, parts = prompt.text, list(prompt.images)
        if limit is not None and self.tokenizer.fewest_tokens(text) > limit:
            raise PromptTooLong(
                f"the text has {len(text)} characters, more than the context of {limit} tokens can hold",
                param="messages",
            )
        turns = _turns(prompt)
        pictures = self._resolve_detail(parts, _question(turns), load, steps_down)
        images = self._plan_images(pictures, RequestContext(_question(turns), salt, load, turns))
        clips = (part for part in parts if isinstance(part, VideoPart))
        videos = [self._plan_video(index, part, salt) for index, part in enumerate(clips)]
        _check_visual(videos, limit)
        what = "text" if isinstance(prompt, TextPrompt) else "messages"
        return self._lay_out(text, images, videos, what)

    def settle(self, outline: PreparedPrompt) -> PreparedPrompt:
        """Replace the placeholders of an outline. The number of tokens stays.

        This decodes videos, so it is for a worker thread, after memory for the frames was reserved. Raises
        InvalidVideo.
        """
        if not outline.unsettled_videos:
            return outline
        videos = [video if video.settled else self._settle(video) for video in outline.videos]
        text, what = outline.source
        return self._lay_out(text, outline.images, videos, what)

    def look_prompt(self, image: Image, plan: VisualPlan, question: str) -> LookPrompt | None:
        """The prompts with which the model looks for what a question is about.

        They are conversations of one turn, so what a look finds serves every conversation.

        plan: with all tokens of the image.

        Returns None if the chat template refuses such a conversation.
        """
        for marker in self._markers:  # those of a text prompt, which stand for its images
            question = question.replace(marker, " ")
        words = f"{question.strip()[-LOOK_CHARACTERS:]} {BRIEFLY}"
        alike = replace(
            plan, width=0, height=0, tokens=1, text=plan.text_of(1), grid=(1, 1, 1), sizes=(), key=""
        )
        try:
            asked, neutral = self._one_turn(alike, words), self._one_turn(alike, NEUTRAL)
        except InvalidRequest as error:
            log.debug("the model cannot look for what a question is about: %s", error.message)
            return None
        return LookPrompt(*asked, neutral[1]) if asked[0] == neutral[0] else None

    def _write_turn(self, plan: VisualPlan, words: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids before and after the visual token in a conversation of one turn.

        plan: of one visual token.
        """
        image = NO_IMAGE
        planned = PlannedImage(image, plan, "", PixelBudget(), "")
        if self.tokenizer.has_template:
            render = self.tokenizer.render_sealed if self._seals_messages else self.tokenizer.render
            text, what = render([Message("user", (ImagePart(image), TextPart(words)))]), "messages"
        else:
            text, what = f"{self._markers[0]}\n{words}\n", "text"
        prompt = self._lay_out(text, [planned], [], what)
        [span] = prompt.spans
        return tuple(prompt.ids[: span.start]), tuple(prompt.ids[span.end :])

    def _lay_out(
        self, text: str, images: Sequence[PlannedImage], videos: Sequence[PlannedVideo], what: str
    ) -> PreparedPrompt:
        seals = what == "messages" and self._seals_messages
        sealed = seals and self.tokenizer.is_sealed(text)
        markers = self._sealed_markers if sealed else self._markers
        # Texts and markers in turn: every odd segment is a marker.
        segments = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
        self._check_markers([markers.index(marker) for marker in segments[1::2]], images, videos, what)
        order: list[PlannedImage | PlannedVideo] = []
        next_images, next_videos = enumerate(images), iter(videos)
        for at in range(1, len(segments), 2):
            if segments[at] == markers[0]:
                place, image = next(next_images)
                content = image.plan.text_at(place)
                order.append(image)
            else:
                video = next(next_videos)
                content = video.plan.text
                order.append(video)
            segments[at] = self.tokenizer.seal(content) if sealed else content
        encode = self.tokenizer.encode_sealed if seals else self.tokenizer.encode
        ids, positions = self._encode("".join(segments), encode, markers)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return PreparedPrompt(
            ids,
            self._spans(positions, order),
            tuple(images),
            tuple(videos),
            (text, what),
            what == "messages" and self.tokenizer.ends_thinking(text),
        )

    def _from_ids(self, prompt: TokenPrompt) -> PreparedPrompt:
        size = self.tokenizer.vocab_size
        if not prompt.ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        wrong = [i for i in prompt.ids if not 0 <= i < size]
        if wrong:
            raise InvalidRequest(f"token id {wrong[0]} is outside the vocabulary [0, {size})", param="prompt")
        for token, noun in zip(self._tokens, ("an image", "a video"), strict=False):
            if token in prompt.ids:
                raise InvalidRequest(
                    f"token id {token} stands for {noun}; send {noun.split()[1]}s as parts of messages",
                    param="prompt",
                )
        return PreparedPrompt(list(prompt.ids), (), ())

    def _from_plans(self, prompt: PlannedPrompt, salt: str) -> PreparedPrompt:
        """Take over what another engine has prepared. Raises InvalidRequest if it does not fit together."""
        images = [read_plan(part.plan, part.image, salt) for part in prompt.images]
        ids = list(prompt.ids)
        if not ids:
            ids = [self._tokens[0]] * sum(image.plan.tokens for image in images)
        places = [place for place, token in enumerate(ids) if token in self._tokens[:1]]
        if not ids or min(ids) < 0:
            raise InvalidRequest("the prompt is empty, or has ids below 0", param="ids")
        return PreparedPrompt(ids, self._spans(places, images), tuple(images))

    def _resolve_detail(
        self, parts: Sequence[ImagePart | VideoPart], question: str, load: float, steps_down: int
    ) -> list[tuple[ImagePart, str]]:
        """Return the images, each with a level in place of `auto`, and the reason for the level."""
        pictures = [part for part in parts if isinstance(part, ImagePart)]
        settled = [self.detail.settle(part.budget, question, load, steps_down) for part in pictures]
        return [
            (replace(part, budget=budget), reason)
            for part, (budget, reason) in zip(pictures, settled, strict=True)
        ]

    def _plan_images(
        self, pictures: Sequence[tuple[ImagePart, str]], context: RequestContext
    ) -> list[PlannedImage]:
        """pictures: images, each with the reason for its level."""
        parts = [part for part, _ in pictures]
        plans = [self._plan(index, part, len(parts)) for index, part in enumerate(parts)]
        planned = []
        for (part, reason), plan, chosen in zip(
            pictures, plans, self._visual_budget.reduce_all(parts, plans, context), strict=True
        ):
            image, budget = part.image, part.budget
            if chosen is None:
                planned.append(PlannedImage(image, plan, context.key(image, plan), budget, reason))
                continue
            left = chosen.method, plan.tokens
            if not METHODS[chosen.method].for_text and asks_for_text(context.question):
                reason += f"; the question is about text, and {chosen.method} is known to lose it"
                log.warning("%s is known to lose text, and a question is about text", chosen.method)
            planned.append(PlannedImage(image, chosen.plan, chosen.key, budget, reason, left))
        return planned

    def _plan(self, index: int, part: ImagePart, count: int) -> VisualPlan:
        """Return the plan of an image with all of its tokens."""
        try:
            return self.processor.plan(part.image.width, part.image.height, part.budget, images=count)
        except InvalidImage as error:
            raise error.at(index) from error

    def _check_videos(self, parts: Sequence[ImagePart | VideoPart]) -> None:
        if self._videos is None and any(isinstance(part, VideoPart) for part in parts):
            raise InvalidRequest(
                f"this model takes no videos; models that do: {self._video_models}. Send frames as images "
                "instead",
                param="messages",
                code="video_not_supported",
            )

    def _plan_video(self, index: int, part: VideoPart, salt: str) -> PlannedVideo:
        assert self._videos is not None
        try:
            plan = self._videos.plan(part.video, part.budget)
            part.video.source.check(plan.indices)
        except InvalidMedia as error:
            raise InvalidVideo(error.reason, index=index, param=error.param) from error
        clip = self._clips.clip(part.video, plan, self._videos, salt)
        cells = self._clips.get(clip, plan.kept_tokens) if plan.is_pruned else None
        video = PlannedVideo(index, plan, clip, salt, settled=not plan.is_pruned)
        return video if cells is None else self._prune(video, cells)

    def _settle(self, video: PlannedVideo) -> PlannedVideo:
        """Find the cells that a pruned video keeps, by decoding its frames if need be."""
        try:
            return self._prune(video, self._clips.get_or_find(video.clip, video.plan.kept_tokens))
        except InvalidMedia as error:
            raise error.at(video.index) from error

    def _prune(self, video: PlannedVideo, cells: KeptCells) -> PlannedVideo:
        assert self._videos is not None
        return replace(video, plan=self._videos.settle(video.clip.video, video.plan, cells), settled=True)

    def _check_markers(
        self, kinds: Sequence[int], images: Sequence[PlannedImage], videos: Sequence[PlannedVideo], what: str
    ) -> None:
        """kinds: for each marker of the text its place in `self._markers`."""
        wanted = (("image", len(images)), ("video", len(videos)))
        is_text = what == "text" or not self._seals_messages
        why = "the text may not contain the marker itself" if is_text else "the chat template must write them"
        for kind, (marker, (noun, count)) in enumerate(zip(self._markers, wanted, strict=False)):
            if (markers := kinds.count(kind)) != count:
                raise InvalidRequest(
                    f"the prompt holds {markers} {noun} markers {marker!r} for {count} {noun}s; {why}",
                    param=what,
                )

    def _encode(
        self, text: str, encode: Callable[[str], list[int]], markers: Sequence[str]
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and the positions of visual tokens among them.

        A page has thousands of visual tokens in a row. A marker is a control token, so it has one id
        everywhere. So the tokenizer gets one marker for each run of equal markers, which saves milliseconds.
        """
        if not markers:
            return encode(text), []
        lengths: list[int] = []

        def shorten(row: re.Match[str]) -> str:
            marker = row[row.lastindex or 0]
            lengths.append(len(row[0]) // len(marker))
            return marker

        short = encode(re.sub("|".join(f"(?:({re.escape(marker)}))+" for marker in markers), shorten, text))
        places = [i for i, token in enumerate(short) if token in self._tokens]
        if len(places) != len(lengths):  # the text holds a marker of its own; `_spans` says so
            ids = encode(text)
            return ids, [i for i, token in enumerate(ids) if token in self._tokens]
        ids, done = [], 0
        positions: list[int] = []
        for place, length in zip(places, lengths, strict=True):
            ids += short[done:place]
            positions += range(len(ids), len(ids) + length)
            ids += [short[place]] * length
            done = place + 1
        return ids + short[done:], positions

    def _spans(
        self, positions: list[int], order: Sequence[PlannedImage | PlannedVideo]
    ) -> tuple[ImageSpan, ...]:
        """positions: those of visual tokens in the prompt."""
        templates = list(unplaced_spans(order))
        planned = sum(span.tokens for span in templates)
        if len(positions) != planned:
            raise InvalidRequest(
                f"the text contains {len(positions)} visual tokens, but the images and videos have "
                f"{planned}; remove image tokens from the text"
            )
        spans, used = [], 0
        for span in templates:
            first, last = positions[used], positions[used + span.tokens - 1]
            used += span.tokens
            spans.append(replace(span, start=first, length=last - first + 1))
        return tuple(spans)


def _turns(prompt: ChatPrompt | TextPrompt) -> tuple[Turn, ...]:
    """Return the user's text turn by turn, each with the number of images up to then."""
    if isinstance(prompt, TextPrompt):
        return ((prompt.text, len(prompt.images)),)
    turns, images = [], 0
    for message in prompt.messages:
        images += sum(isinstance(part, ImagePart) for part in message.parts)
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        if texts and message.role == "user":
            turns.append(("\n".join(texts), images))
    return tuple(turns)


def _question(turns: Sequence[Turn]) -> str:
    """Return the text of all turns of the user, because the last turn may ask about an image of the first."""
    return "\n".join(text for text, _ in turns)


def _check_visual(videos: Sequence[PlannedVideo], limit: int | None) -> None:
    """Refuse videos that do not fit even without text, before their text is written.

    That text may have hundreds of thousands of tokens.
    """
    tokens = sum(video.plan.kept_tokens for video in videos)
    if limit is not None and tokens >= limit:
        raise PromptTooLong(
            f"the videos have {tokens} tokens ({'; '.join(video.cost for video in videos)}); "
            f"the context holds {limit}, answer included; ask for fewer frames (fps, max_frames) "
            "or pixels (max_pixels)",
            param="messages",
        )
