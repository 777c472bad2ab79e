"""The protocols of image processors, and the values that they return.

A processor first makes a plan from an image's dimensions alone. Later it makes the arrays that the plan
describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.errors import EngineError
from fovea.core.media import Image, PixelBudget
from fovea.engine.vision.processor.settings import Config

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class LookPrompt:
    """Two prompts about one image, as token ids: one with a question, one with a request to describe it.

    before: the ids before the image, of both.
    asked, neutral: the ids after the image.
    """

    before: tuple[int, ...]
    asked: tuple[int, ...]
    neutral: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """The choice of fewer visual tokens than an image has, for the encoder to carry out.

    method: a name in `visual_budget.methods.METHODS`.
    full_tokens: tokens of the image without a reduction.
    whole_key: key of all of these tokens in the encoder-output cache.
    key: key of the reduced tokens in that cache.
    salt: the request's cache salt.
    question: the user's words of the last turn; empty if the method does not use them.
    word_ids: the last token ids of the question; empty if the method does not use them.
    load: the engine's load, rounded to quarters, at most 1; 0 if the method does not use it.
    look: the prompts by which the model looks for what the question is about; None: there is no question, or
        the method does not look.
    """

    method: str
    full_tokens: int
    whole_key: str
    key: str
    salt: str = ""
    question: str = field(default="", repr=False)
    word_ids: tuple[int, ...] = field(default=(), repr=False)
    load: float = 0.0
    look: LookPrompt | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class VisualPlan:
    """The visual tokens and prompt text of an image, and how its pixels will be prepared.

    A processor's plan depends on the image's dimensions and budget, never on its pixels.

    width, height: of the source image, in pixels.
    tokens: positions of the prompt that are the model's image token. Encoder output fills them if `states` is
        0.
    grid: how the image is cut. It depends on the architecture:
        Qwen, PaddleOCR-VL, GLM-4V: (frames, rows, columns) of patches, before merging.
        LLaVA: (1, rows, columns) of patches.
        LLaVA-NeXT, LLaVA-OneVision: (1, rows, columns) of tiles, without the view of the whole image;
            (1, 0, 0): that view alone.
        Idefics3, SmolVLM, LFM2-VL, MiniCPM-V, DeepSeek-OCR 2: (1, rows, columns) of tiles, without the view
            of the whole image; (1, 0, 0): that view alone.
        Pixtral, Mistral 3, LightOnOCR, Gemma 4: (1, rows, columns) of patches, before merging.
        InternVL: (views, rows, columns): the number of views of the whole image, 0 or 1, and the tiles beside
            it; (1, 0, 0): that view alone.
        Llama 3.2 Vision: (1, rows, columns) of tiles; there is no view of the whole image beside them.
    text: the text that replaces the image's marker in the prompt.
    key: names everything that shapes the pixels. Images of equal identity and equal key give equal arrays.
    sizes: (height, width) after each successive resize of the whole picture, in order, in pixels.
    kept_cells: cells of the merged grid, ascending, whose tokens remain after pruning; None: all. Only
        videos are pruned.
    reduction: how the encoder chooses among the image's tokens; None: it keeps all. `tokens` counts those
        that remain.
    around: the parts of `text` before and after the visual tokens.
    number: text before `text` that names the image by its number in the prompt, from 0; "{}" stands for the
        number. "": the images of a prompt have no numbers.
    states: rows of encoder output that lie outside of the prompt and that cross-attention layers read; 0: the
        encoder's output fills the image's tokens, one row each.
    """

    width: int
    height: int
    tokens: int
    grid: tuple[int, int, int]
    text: str = field(repr=False)
    key: str
    sizes: tuple[tuple[int, int], ...] = ()
    kept_cells: tuple[int, ...] | None = None
    reduction: Reduction | None = None
    around: tuple[str, str] = field(default=("", ""), repr=False)
    number: str = field(default="", repr=False)
    states: int = 0

    @property
    def rows(self) -> int:
        """Rows of encoder output."""
        return self.states or self.tokens

    def check(self, image: Image) -> None:
        """Raise EngineError if this is the plan of an image of other dimensions.

        The arrays would not fit the number of tokens in the prompt.
        """
        if (image.width, image.height) != (self.width, self.height):
            raise EngineError(
                f"an image of {image.width}x{image.height} pixels has the plan of an image of "
                f"{self.width}x{self.height}"
            )

    def text_at(self, place: int) -> str:
        """The text of the image at a place among the images of a prompt, from 0."""
        return self.number.format(place) + self.text

    def text_of(self, tokens: int) -> str:
        """The text for another number of visual tokens. There must be no text between the tokens."""
        before, after = self.around
        run = self.text[len(before) : len(self.text) - len(after)]
        return before + run[: len(run) // self.tokens] * tokens + after


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image, ready for its encoder. The arrays of several images can be concatenated along axis 0.

    identity: identity of the source `Image`.
    arrays: arrays by name:
        "pixel_values", normalised, in the encoder's type: float32, float16, or uint16, which are the bits of
            bfloat16 (`pixels.Values`):
            Qwen, PaddleOCR-VL, GLM-4V: (patches, channels * patch * patch), patches in merge-window order; of
                videos (patches, channels * frames * patch * patch).
            LFM2-VL, MiniCPM-V: (1, patches, channels * patch * patch), the view of the whole image.
            Pixtral, Mistral 3, LightOnOCR: (patches, channels * patch * patch), patches row by row.
            DeepSeek-OCR 2: (1, channels, height, width), the view of the whole image.
            Gemma 4: (patches, patch * patch * channels), patches row by row, always float32.
            others: (tiles, channels, height, width). Llama 3.2 Vision: without tiles of padding.
        "tiles", of that type, (tiles, patches, channels * patch * patch): LFM2-VL, MiniCPM-V; only images in
            tiles have it. The patches of MiniCPM-V, here and in "pixel_values", come in the order of
            `siglip.MergingViT`.
            DeepSeek-OCR 2: (tiles, channels, height, width).
        "grid_thw", int64 (1, 3): Qwen, PaddleOCR-VL, GLM-4V; (frames, rows, columns) of patches.
        "image_sizes", int64 (1, 2): LLaVA-NeXT and LLaVA-OneVision; (height, width) of the source image.
        "pixel_attention_mask", bool (tiles, height, width): Idefics3 and SmolVLM; true where there is image.
        "aspect_ratio_ids", int64 (1,): Llama 3.2 Vision; the number of the grid of tiles among all grids that
            the model knows, from 1.
        An image that is encoded region by region also has its survey; rows and columns are those of the
        merged grid: "channels", float32 (rows, columns, channels), its texture; "luma", uint8 (height,
        width), the luminance of the pixels; "propositional" and "perspectival", float32 (rows, columns).
        Qwen, PaddleOCR-VL, GLM-4V: such an image has "rgb", uint8 (height, width, 3), the resized pixels, in
        place of "pixel_values" and "grid_thw".
    """

    identity: str
    plan: VisualPlan
    arrays: Arrays = field(repr=False, compare=False)


class AnySizeProcessor(Protocol):
    """A processor that prepares pictures of any size.

    So a region of an image can be cut out and encoded as a picture of its own.
    """

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        ...

    @property
    def resample(self) -> Resampling:
        """The filter that resizes pictures."""
        ...

    def patches(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Turn a picture into "pixel_values": bytes (height, width, 3) to (patches, values)."""
        ...


class ResizingProcessor(AnySizeProcessor, Protocol):
    """A processor that can also make an image smaller than its plan."""

    def shrink(self, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
        """The largest plan of at most `most` tokens; the plan itself if it has no more."""
        ...


class RegionProcessor(Protocol):
    """Prepares images that are encoded region by region (`fovea.relevance`)."""

    @property
    def fewest_tokens(self) -> int:
        """The smallest number of tokens that such an image can have."""
        ...

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        """Prepare an image whose plan has a reduction by region. CPU-bound; called in a worker thread."""
        ...

    def whole(self, image: ProcessedImage) -> ProcessedImage:
        """Return the image as it is prepared without the reduction, with all of its tokens."""
        ...

    def enough_tokens(self, image: Image, plan: VisualPlan, question: str) -> int:
        """Number of tokens that a question about the image needs, for the budget `auto`.

        plan: with all tokens. CPU-bound, some milliseconds.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The operations that a processor's images allow, beside encoding them whole.

    The methods of reduction that a model supports follow from these
    (`visual_budget.choose.possible_methods`). A new model declares nothing else for them.

    images: the model takes images at all.
    droppable: visual tokens can be left out; false if the prompt has text between them.
    encoder_taps: attention and keys inside the vision tower can be read (`reduce.taps`).
    any_size: prepares pictures of any size; None: the encoder takes fixed sizes only.
    resize: makes images smaller; None: images cannot be made smaller.
    regions: prepares images region by region; None: images cannot be encoded by region.
    decoder_probe: the decoder's first layers are attention, whose scores a method can read (`reduce.probe`).
    """

    images: bool = True
    droppable: bool = True
    encoder_taps: bool = False
    any_size: AnySizeProcessor | None = None
    resize: ResizingProcessor | None = None
    regions: RegionProcessor | None = None
    decoder_probe: bool = True


class ImageProcessor(Protocol):
    """Plans and prepares the images of one model. Thread-safe, because it holds settings only."""

    @property
    def capabilities(self) -> Capabilities:
        """The operations that this model's images allow."""
        ...

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        """Plan an image. images: how many images the conversation holds; only LLaVA-OneVision uses it.

        Raises InvalidRequest for a budget that cannot be met, InvalidImage for unusable dimensions.
        """
        ...

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        """Prepare the encoder's input. CPU-bound; called in a worker thread.

        plan: made by this processor, for an image of these dimensions.
        """
        ...


def begins_with_attention(model: Config) -> bool:
    """Whether the decoder's first two layers attend to all tokens. model: config.json."""
    text = model.get("text_config")
    kinds = text.get("layer_types") if isinstance(text, Mapping) else None
    return not kinds or set(kinds[:2]) == {"full_attention"}
