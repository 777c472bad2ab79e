"""A prompt as the decoder sees it: ids, and which of them stand for which image or frames of a video.

Pure arithmetic on text: the processors' plans say how many visual tokens an image or a video becomes before any pixel
is touched, so a prompt that cannot fit is refused from the headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidRequest, InvalidVideo, PromptTooLong
from fovea.core.image import VisualTokens
from fovea.core.types import ChatPrompt, ImagePart, Prompt, TextPart, TextPrompt, TokenPrompt, VideoPart
from fovea.engine.request.clip import PlannedVideo
from fovea.engine.request.clips import Clips
from fovea.engine.request.prompt_plan import PlannedImage, PreparedPrompt
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.processor.base import ImageProcessor, VisualPlan
from fovea.engine.vision.processor.pruning import Kept
from fovea.engine.vision.processor.video import QwenVideos
from fovea.engine.visual_budget.choose import Asked, Reducing
from fovea.engine.visual_budget.detail import DetailRule, Full
from fovea.relevance.naming import Turn


class PromptBuilder:
    """videos: what becomes of videos, and the id that stands for them; None for models that take none.

    detail: what `auto` is.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        processor: ImageProcessor,
        image_token_id: int,
        videos: tuple[QwenVideos, int] | None = None,
        accepting: str = "",
        detail: DetailRule | None = None,
        visual: VisualTokens | None = None,
        learned: str = "",
    ) -> None:
        """learned: as `Reducing` has it. visual: for images whose request does not say how many tokens to keep; None: all. accepting: models that take videos, for the message of one that does not."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._accepting = accepting
        self.detail = detail or DetailRule(Full())
        self._reducing = Reducing(processor, tokenizer.encode, visual, learned)
        if self.detail.degrade_from and self.detail.degrade_by != "detail":
            self._reducing.allow("degrade_by", self.detail.degrade_by)
        self._videos = videos[0] if videos else None
        self._clips = Clips()
        self._tokens = (image_token_id, *((videos[1],) if videos else ()))
        self._markers = tuple(tokenizer.token_text(token) for token in self._tokens)
        self._split = re.compile("(" + "|".join(map(re.escape, self._markers)) + ")")

    def build(
        self, prompt: Prompt, salt: str = "", limit: int | None = None, load: float = 0.0
    ) -> PreparedPrompt:
        """`outline` and `settle` in one."""
        return self.settle(self.outline(prompt, salt, limit, load))

    def outline(
        self, prompt: Prompt, salt: str = "", limit: int | None = None, load: float = 0.0
    ) -> PreparedPrompt:
        """The prompt, but for pruned videos that nobody has looked at: in their place stand as many tokens, in other groups.

        Raises InvalidRequest when images and markers do not match, or a budget cannot be met.
        limit: tokens of the context. Text that cannot fit by its length alone is refused before it is tokenized,
        which takes seconds for megabytes.
        load: of the engine, for the rule that says what `auto` is.
        """
        if isinstance(prompt, TokenPrompt):
            return self._from_ids(prompt)
        parts: list[ImagePart | VideoPart]
        if isinstance(prompt, ChatPrompt):
            parts = [p for m in prompt.messages for p in m.parts if isinstance(p, ImagePart | VideoPart)]
            self._check_videos(parts)
            text = self._tokenizer.render(prompt.messages)
        else:
            text, parts = prompt.text, list(prompt.images)
        if limit is not None and self._tokenizer.fewest_tokens(text) > limit:
            raise PromptTooLong(
                f"the text has {len(text)} characters, which is more than the context of {limit} tokens can hold",
                param="messages",
            )
        turns = _turns(prompt)
        pictures = self._look(parts, _question(turns), load)
        images = self._plan_images(pictures, Asked(_question(turns), salt, load, turns))
        clips = (part for part in parts if isinstance(part, VideoPart))
        videos = [self._plan_video(index, part, salt) for index, part in enumerate(clips)]
        _check_visual(videos, limit)
        what = "text" if isinstance(prompt, TextPrompt) else "messages"
        return self._lay_out(text, images, videos, what)

    def settle(self, outline: PreparedPrompt) -> PreparedPrompt:
        """The prompt itself, as long as its outline; decodes videos, so it is for a worker thread that has room for them."""
        if not outline.unsettled:
            return outline
        videos = [video if video.settled else self._settle(video) for video in outline.videos]
        text, what = outline.source
        return self._lay_out(text, outline.images, videos, what)

    def _lay_out(
        self, text: str, images: Sequence[PlannedImage], videos: Sequence[PlannedVideo], what: str
    ) -> PreparedPrompt:
        pieces = self._split.split(text)
        self._check_markers(pieces, images, videos, what)
        order: list[PlannedImage | PlannedVideo] = []
        rest_images, rest_videos = iter(images), iter(videos)
        for at in range(1, len(pieces), 2):
            planned = next(rest_images) if pieces[at] == self._markers[0] else next(rest_videos)
            pieces[at] = planned.plan.text
            order.append(planned)
        ids = self._tokenizer.encode("".join(pieces))
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return PreparedPrompt(ids, self._spans(ids, order), tuple(images), tuple(videos), (text, what))

    def _from_ids(self, prompt: TokenPrompt) -> PreparedPrompt:
        size = self._tokenizer.vocab_size
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

    def _look(
        self, parts: Sequence[ImagePart | VideoPart], question: str, load: float
    ) -> list[tuple[ImagePart, str]]:
        """The images, each with a level in place of `auto` and the reason for it."""
        pictures = [part for part in parts if isinstance(part, ImagePart)]
        settled = [self.detail.settle(part.budget, question, load) for part in pictures]
        return [
            (replace(part, budget=budget), reason)
            for part, (budget, reason) in zip(pictures, settled, strict=True)
        ]

    def _plan_images(self, pictures: Sequence[tuple[ImagePart, str]], asked: Asked) -> list[PlannedImage]:
        """pictures: each with the reason for its level."""
        parts = [part for part, _ in pictures]
        plans = [self._plan(index, part, len(parts)) for index, part in enumerate(parts)]
        planned = []
        for (part, reason), plan, chosen in zip(
            pictures, plans, self._reducing.choose(parts, plans, asked), strict=True
        ):
            image, budget = part.image, part.budget
            if chosen is None:
                planned.append(PlannedImage(image, plan, asked.key(image, plan), budget, reason))
                continue
            left = chosen.method, plan.tokens
            planned.append(PlannedImage(image, chosen.plan, chosen.key, budget, reason, left))
        return planned

    def _plan(self, index: int, part: ImagePart, count: int) -> VisualPlan:
        """With all of its tokens."""
        try:
            return self._processor.plan(part.image.width, part.image.height, part.budget, images=count)
        except InvalidImage as error:
            raise error.at(index) from error

    def _check_videos(self, parts: Sequence[ImagePart | VideoPart]) -> None:
        if self._videos is None and any(isinstance(part, VideoPart) for part in parts):
            raise InvalidRequest(
                f"this model takes no videos; models that do: {self._accepting}. Send frames as images instead",
                param="messages",
                code="video_not_supported",
            )

    def _plan_video(self, index: int, part: VideoPart, salt: str) -> PlannedVideo:
        assert self._videos is not None
        try:
            plan = self._videos.plan(part.video, part.budget)
        except InvalidMedia as error:
            raise InvalidVideo(error.reason, index=index, param=error.param) from error
        clip = self._clips.clip(part.video, plan, self._videos, salt)
        kept = self._clips.known(clip, plan.kept) if plan.pruned else None
        video = PlannedVideo(index, plan, clip, salt, settled=not plan.pruned)
        return video if kept is None else self._keeping(video, kept)

    def _settle(self, video: PlannedVideo) -> PlannedVideo:
        """A pruned video with the cells that its frames choose."""
        try:
            return self._keeping(video, self._clips.look(video.clip, video.plan.kept))
        except InvalidMedia as error:
            raise error.at(video.index) from error

    def _keeping(self, video: PlannedVideo, kept: Kept) -> PlannedVideo:
        assert self._videos is not None
        return replace(video, plan=self._videos.settle(video.clip.video, video.plan, kept), settled=True)

    def _check_markers(
        self,
        pieces: Sequence[str],
        images: Sequence[PlannedImage],
        videos: Sequence[PlannedVideo],
        what: str,
    ) -> None:
        wanted = (("image", len(images)), ("video", len(videos)))
        for marker, (noun, count) in zip(self._markers, wanted, strict=False):
            found = pieces[1::2].count(marker)
            if found != count:
                raise InvalidRequest(
                    f"the prompt holds {found} {noun} markers {marker!r} for {count} {noun}s; "
                    "the marker itself may not stand in the text of a message",
                    param=what,
                )

    def _spans(self, ids: list[int], order: Sequence[PlannedImage | PlannedVideo]) -> tuple[ImageSpan, ...]:
        places = [i for i, token in enumerate(ids) if token in self._tokens]
        cut = list(_cut(order))
        wanted = sum(span.tokens for span in cut)
        if len(places) != wanted:
            raise InvalidRequest(f"{len(places)} image tokens in the prompt, the images make {wanted}")
        spans, taken = [], 0
        for span in cut:
            first, last = places[taken], places[taken + span.tokens - 1]
            taken += span.tokens
            spans.append(replace(span, start=first, length=last - first + 1))
        return tuple(spans)


def _turns(prompt: ChatPrompt | TextPrompt) -> tuple[Turn, ...]:
    """What the user says, turn by turn, and how many images there are by then."""
    if isinstance(prompt, TextPrompt):
        return ((prompt.text, len(prompt.images)),)
    turns, images = [], 0
    for message in prompt.messages:
        images += sum(isinstance(part, ImagePart) for part in message.parts)
        said = [part.text for part in message.parts if isinstance(part, TextPart)]
        if said and message.role == "user":
            turns.append(("\n".join(said), images))
    return tuple(turns)


def _question(turns: Sequence[Turn]) -> str:
    """All that the user says: an image in the first turn may be asked about in the last."""
    return "\n".join(words for words, _ in turns)


def _cut(order: Sequence[PlannedImage | PlannedVideo]) -> Iterator[ImageSpan]:
    """Spans in the order of the prompt, without their places yet."""
    images = 0
    for planned in order:
        if isinstance(planned, PlannedImage):
            plan = planned.plan
            full = 0 if plan.reduction is None else plan.reduction.full
            yield ImageSpan(images, 0, 0, plan.tokens, planned.key, plan.grid, full_tokens=full)
            images += 1
            continue
        clip, groups = planned.plan, planned.groups
        for group in groups:
            yield ImageSpan(
                index=planned.index,
                start=0,
                length=0,
                tokens=group.plan.tokens,
                key=group.key,
                grid=group.plan.grid,
                kept_cells=group.plan.kept,
                time=clip.times[group.number],
                has_more=clip.joined and group is not groups[-1],
            )


def _check_visual(videos: Sequence[PlannedVideo], limit: int | None) -> None:
    """Videos that are too long by themselves, before their text is written: that may be hundreds of thousands of tokens."""
    tokens = sum(video.plan.kept for video in videos)
    if limit is not None and tokens >= limit:
        raise PromptTooLong(
            f"the videos have {tokens} tokens ({'; '.join(video.cost for video in videos)}); the context holds {limit}, "
            "answer included; ask for fewer frames (fps, max_frames) or pixels (max_pixels)",
            param="messages",
        )
