"""What every kind of image processor promises: a plan from the header alone, then arrays that keep to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.errors import EngineError
from fovea.core.image import Image, PixelBudget

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which of the tokens that an image would have are handed on.

    method: its name in `engine.reduce.methods`. full: how many there would be. whole: the image's key in the encoder-output
    cache with all of them. key: with these. salt: of the request. question, words: what the user says, and its ids, for
    methods that look at it. load: of the engine, in quarters, for those that go by it.
    """

    method: str
    full: int
    whole: str
    key: str
    salt: str = ""
    question: str = field(default="", repr=False)
    words: tuple[int, ...] = field(default=(), repr=False)
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class VisualPlan:
    """What will be made of an image; depends on its dimensions and budget, never on its pixels.

    width, height: of the source image, in pixels.
    tokens: positions of the prompt that encoder output fills; all are the model's image token.
    grid: how the image is cut, per kind:
        Qwen: (frames, rows, columns) of patches, before merging. LLaVA: (1, rows, columns) of patches.
        LLaVA-NeXT, LLaVA-OneVision: (1, rows, columns) of tiles, the base view not counted; (1, 0, 0) is that alone.
        Idefics3, SmolVLM: (1, rows, columns) of tiles, the global view not counted; (1, 0, 0) is the global view alone.
    text: what one image marker of the prompt expands to.
    key: names everything that shapes the pixels; images of equal identity and equal key give equal arrays.
    resized: (height, width) of each successive resize of the whole picture, in order, in pixels.
    kept: which tokens of the merged grid, ascending, are handed on, if not all; only videos are pruned.
    reduction: who chooses among the tokens of an image, if not all are handed on; `tokens` are those that are.
    """

    width: int
    height: int
    tokens: int
    grid: tuple[int, int, int]
    text: str = field(repr=False)
    key: str
    resized: tuple[tuple[int, int], ...] = ()
    kept: tuple[int, ...] | None = None
    reduction: Reduction | None = None


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image, ready for its encoder. Every array concatenates with those of other images along axis 0.

    identity: of the source `Image`.
    arrays: "pixel_values", float32:
            Qwen: (patches, channels * frames * patch * patch), patches in merge-window order.
            others: (tiles, channels, height, width).
        "grid_thw", int64 (1, 3): Qwen; (frames, rows, columns) of patches.
        "image_sizes", int64 (1, 2): LLaVA-NeXT and LLaVA-OneVision; (height, width) of the source image.
        "pixel_attention_mask", bool (tiles, height, width): Idefics3 and SmolVLM; true where there is image.
        Of an image that is to be seen in parts, instead: "rgb", uint8 (height, width, 3), resized; "channels", its texture;
        "propositional" and "perspectival", float32 maps over the merged grid.
    """

    identity: str
    plan: VisualPlan
    arrays: Arrays = field(repr=False, compare=False)


class AnySizeProcessor(Protocol):
    """A processor that prepares pictures of any size, so regions can be cut out and encoded as pictures of their own."""

    @property
    def factor(self) -> int:
        """Side in pixels of what becomes one visual token."""
        ...

    @property
    def resample(self) -> Resampling: ...

    def patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The encoder's input of a picture: (height, width, 3) bytes to (patches, values)."""
        ...


class ResizingProcessor(AnySizeProcessor, Protocol):
    """A processor that can also make an image smaller than its plan."""

    def shrink(self, plan: VisualPlan, budget: PixelBudget, most: int) -> VisualPlan:
        """The largest plan of at most `most` tokens; the plan itself if it has no more."""
        ...


class RegionProcessor(Protocol):
    """Prepares images that are seen region by region (`fovea.relevance`)."""

    @property
    def fewest_tokens(self) -> int:
        """The least tokens that such an image can have."""
        ...

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        """The pixels of an image whose plan has such a reduction. CPU-bound, for a worker thread."""
        ...

    def whole(self, image: ProcessedImage) -> ProcessedImage:
        """The processed image with all of its tokens, as the encoder takes it."""
        ...

    def own_tokens(self, image: Image, plan: VisualPlan) -> int:
        """How many tokens the image needs by its content, if no request says. CPU-bound, some milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a processor's images allow beside being encoded whole. A new model declares these and nothing else.

    droppable: visual tokens can be left out; false if text stands between them.
    encoder_taps: the vision tower shows its attention and keys (`reduce.taps`).
    any_size: pictures of any size can be encoded; None: they have fixed sizes.
    resize: images can be made smaller; None: they cannot.
    regions: images can be seen region by region; None: they cannot.
    """

    droppable: bool = True
    encoder_taps: bool = False
    any_size: AnySizeProcessor | None = None
    resize: ResizingProcessor | None = None
    regions: RegionProcessor | None = None


class ImageProcessor(Protocol):
    """Thread-safe: holds settings only."""

    @property
    def capabilities(self) -> Capabilities: ...

    def plan(self, width: int, height: int, budget: PixelBudget, *, images: int = 1) -> VisualPlan:
        """Plan an image. images: how many images the conversation holds; only LLaVA-OneVision uses it.

        Raises InvalidRequest for a budget that cannot be met, InvalidImage for unusable dimensions.
        """
        ...

    def process(self, image: Image, plan: VisualPlan) -> ProcessedImage:
        """The encoder's input. plan: this processor's own, for an image of these dimensions."""
        ...


def expect_planned(image: Image, plan: VisualPlan) -> None:
    """A plan of another image would give arrays that the prompt has no room for; better to stop here."""
    if (image.width, image.height) != (plan.width, plan.height):
        raise EngineError(
            f"image of {image.width}x{image.height} met the plan of a {plan.width}x{plan.height} image"
        )


def image_sizes(image: Image) -> NDArray[np.int64]:
    """(1, 2): (height, width) of the source image, which the model needs to cut the padding off its features."""
    return np.array([[image.height, image.width]], dtype=np.int64)
