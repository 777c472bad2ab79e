"""A prepared prompt: its token ids, and the images and frames that are encoded for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fovea.core.measure import stage
from fovea.core.media import Image, ImageUse, PixelBudget
from fovea.engine.request.clip import PlannedFrames, PlannedVideo
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, VisualPlan
from fovea.engine.visual_budget.methods import METHODS


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image and its visual plan.

    key: name of the encoder output in the caches.
    budget: detail level and bounds; "auto" is replaced by a level.
    reason: why the image has this level.
    reduction: the method that leaves out visual tokens, and their number without it; None: all tokens stay.
    """

    image: Image
    plan: VisualPlan
    key: str
    budget: PixelBudget = PixelBudget("high")
    reason: str = "the request sets the detail level"
    reduction: tuple[str, int] | None = None

    @property
    def pixel_key(self) -> str:
        """The name of the pixels that the encoder reads.

        Requests that leave out other tokens, or ask other questions, share these pixels.
        """
        reduction = self.plan.reduction
        if reduction is None:
            return self.key
        return (
            f"{reduction.whole_key}\x00in parts"
            if METHODS[reduction.method].by_region
            else reduction.whole_key
        )

    @property
    def use(self) -> ImageUse:
        """Detail level, tokens and reasons, as they are reported to the client."""
        level = "high" if self.budget.detail == "auto" else self.budget.detail
        method, full = (None, None) if self.reduction is None else self.reduction
        return ImageUse(
            "pixels" if self.budget.explicit else level, self.plan.tokens, self.reason, method, full
        )


PlannedInput = PlannedImage | PlannedFrames
"""Something that the encoder turns into visual tokens."""


def process(planned: PlannedInput, processor: ImageProcessor) -> ProcessedImage:
    """Return the pixels of an image or of a group of frames. CPU-bound: for a worker thread.

    Raises InvalidVideo for frames that cannot be decoded.
    """
    with stage("patchify"):
        if isinstance(planned, PlannedFrames):
            return planned.process()
        reduction = planned.plan.reduction
        if reduction is not None and METHODS[reduction.method].by_region:
            assert processor.capabilities.regions is not None
            return processor.capabilities.regions.process(planned.image, planned.plan)
        return processor.process(planned.image, planned.plan)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as token ids, with its images and videos.

    ids: token ids.
    spans: positions of the images and frame groups, in the order of the prompt.
    images: planned images, in the order of the request.
    videos: planned videos, in the order of the request.
    source: the text with a marker for each image and video, and the name of the request's field for errors.
    thinking: whether the prompt ends inside the model's reasoning.
    """

    ids: list[int]
    spans: tuple[ImageSpan, ...]
    images: tuple[PlannedImage, ...]
    videos: tuple[PlannedVideo, ...] = ()
    source: tuple[str, str] = field(default=("", ""), repr=False)
    thinking: bool = False

    @property
    def image_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def unsettled_videos(self) -> tuple[PlannedVideo, ...]:
        """Pruned videos whose kept cells are not known yet, because their frames were not decoded."""
        return tuple(video for video in self.videos if not video.settled)

    @property
    def planned_inputs(self) -> Iterator[PlannedInput]:
        """Everything that is encoded for this prompt, except unsettled videos."""
        yield from self.images
        for video in self.videos:
            if video.settled:
                yield from video.groups

    @property
    def contents(self) -> str:
        """The number of images and the cost of each video, for messages."""
        return "; ".join((f"{len(self.images)} images", *(video.cost for video in self.videos)))


def unplaced_spans(order: Sequence[PlannedImage | PlannedVideo]) -> Iterator[ImageSpan]:
    """Yield the spans of images and videos in the order of the prompt, with start and length 0."""
    images = 0
    for planned in order:
        if isinstance(planned, PlannedImage):
            plan = planned.plan
            full = 0 if plan.reduction is None else plan.reduction.full_tokens
            yield ImageSpan(
                images,
                0,
                0,
                plan.tokens,
                planned.key,
                plan.grid,
                full_tokens=full,
                states=plan.states,
            )
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
                kept_cells=group.plan.kept_cells,
                time=clip.times[group.number],
                has_more=clip.is_contiguous and group is not groups[-1],
            )
