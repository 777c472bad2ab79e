"""A prompt as the decoder sees it: ids, and which of them stand for which image.

Pure arithmetic on text: the image processor's plan says how many visual tokens an image becomes before any pixel is
touched, so a prompt that can not fit is refused from the headers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fovea.core.errors import InvalidImage, InvalidRequest, PromptTooLong
from fovea.core.image import Image
from fovea.core.types import ChatPrompt, ImagePart, Prompt, TextPrompt, TokenPrompt
from fovea.engine.sequence import ImageSpan
from fovea.engine.tokenizer import ChatTokenizer
from fovea.engine.vision.processor.base import ImageProcessor, VisualPlan


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image and what the processor will make of it. `key` names the result in the encoder-output cache."""

    image: Image
    plan: VisualPlan
    key: str


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    ids: list[int]
    spans: tuple[ImageSpan, ...]
    images: tuple[PlannedImage, ...]

    @property
    def image_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)


class PromptBuilder:
    def __init__(self, tokenizer: ChatTokenizer, processor: ImageProcessor, image_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._image_token_id = image_token_id
        self._marker = tokenizer.token_text(image_token_id)

    def build(self, prompt: Prompt, salt: str = "", limit: int | None = None) -> PreparedPrompt:
        """Raises InvalidRequest when images and markers do not match, or a budget can not be met.

        limit: tokens of the context. Text that can not fit by its length alone is refused before it is tokenized,
        which takes seconds for megabytes.
        """
        if isinstance(prompt, TokenPrompt):
            return self._from_ids(prompt)
        if isinstance(prompt, ChatPrompt):
            text = self._tokenizer.render(prompt.messages)
            parts = [p for m in prompt.messages for p in m.parts if isinstance(p, ImagePart)]
        else:
            text, parts = prompt.text, list(prompt.images)
        if limit is not None and self._tokenizer.fewest_tokens(text) > limit:
            raise PromptTooLong(
                f"the text has {len(text)} characters, which is more than the context of {limit} tokens can hold",
                param="messages",
            )
        images = [self._plan(index, part, len(parts), salt) for index, part in enumerate(parts)]
        ids = self._tokenizer.encode(self._expand(text, images, prompt))
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return PreparedPrompt(ids, self._spans(ids, images), tuple(images))

    def _from_ids(self, prompt: TokenPrompt) -> PreparedPrompt:
        size = self._tokenizer.vocab_size
        if not prompt.ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        wrong = [i for i in prompt.ids if not 0 <= i < size]
        if wrong:
            raise InvalidRequest(f"token id {wrong[0]} is outside the vocabulary [0, {size})", param="prompt")
        if self._image_token_id in prompt.ids:
            raise InvalidRequest(
                f"token id {self._image_token_id} stands for an image; send images as parts of messages",
                param="prompt",
            )
        return PreparedPrompt(list(prompt.ids), (), ())

    def _plan(self, index: int, part: ImagePart, count: int, salt: str) -> PlannedImage:
        try:
            plan = self._processor.plan(part.image.width, part.image.height, part.budget, images=count)
        except InvalidImage as error:
            raise error.at(index) from error
        return PlannedImage(part.image, plan, f"{salt}\x00{part.image.identity}\x00{plan.key}")

    def _expand(self, text: str, images: Sequence[PlannedImage], prompt: Prompt) -> str:
        pieces = text.split(self._marker)
        if len(pieces) - 1 != len(images):
            what = "text" if isinstance(prompt, TextPrompt) else "messages"
            raise InvalidRequest(
                f"the prompt holds {len(pieces) - 1} image markers {self._marker!r} for {len(images)} images; "
                "the marker itself may not stand in the text of a message",
                param=what,
            )
        expanded = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            expanded += [image.plan.text, piece]
        return "".join(expanded)

    def _spans(self, ids: list[int], images: Sequence[PlannedImage]) -> tuple[ImageSpan, ...]:
        places = [i for i, token in enumerate(ids) if token == self._image_token_id]
        wanted = sum(image.plan.tokens for image in images)
        if len(places) != wanted:
            raise InvalidRequest(f"{len(places)} image tokens in the prompt, the images make {wanted}")
        spans, taken = [], 0
        for index, image in enumerate(images):
            first, last = places[taken], places[taken + image.plan.tokens - 1]
            taken += image.plan.tokens
            spans.append(
                ImageSpan(index, first, last - first + 1, image.plan.tokens, image.key, image.plan.grid)
            )
        return tuple(spans)
