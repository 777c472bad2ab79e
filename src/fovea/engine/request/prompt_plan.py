"""What a prompt was made into: its ids, and the images and frames that have to be encoded for it, with their pixels' names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fovea.core.image import Image, ImageUse, PixelBudget
from fovea.core.stage import stage
from fovea.engine.request.clip import PlannedFrames, PlannedVideo
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.regions import process_parts
from fovea.engine.visual_budget.methods import METHODS


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image and what the processor will make of it. `key` names the result in the encoder-output cache.

    budget, reason: at which level it is looked at, and why. chosen: the method that leaves out tokens, and of how many.
    """

    image: Image
    plan: VisualPlan
    key: str
    budget: PixelBudget = PixelBudget("high")
    reason: str = "asked for"
    chosen: tuple[str, int] | None = None

    @property
    def pixels(self) -> str:
        """Names what the encoder needs of it: that does not depend on which tokens are left out, nor on what is asked."""
        reduction = self.plan.reduction
        if reduction is None:
            return self.key
        return f"{reduction.whole}\x00in parts" if METHODS[reduction.method].in_parts else reduction.whole

    @property
    def seen(self) -> ImageUse:
        level = "high" if self.budget.detail == "auto" else self.budget.detail
        method, full = (None, None) if self.chosen is None else self.chosen
        return ImageUse(
            "pixels" if self.budget.explicit else level, self.plan.tokens, self.reason, method, full
        )


Planned = PlannedImage | PlannedFrames


def process(planned: Planned, processor: ImageProcessor) -> ProcessedImage:
    """The pixels of either. CPU-bound: for a worker thread."""
    with stage("patchify"):
        if isinstance(planned, PlannedFrames):
            return planned.process()
        reduction = planned.plan.reduction
        if reduction is not None and METHODS[reduction.method].in_parts:
            return process_parts(processor, planned.image, planned.plan)
        return processor.process(planned.image, planned.plan)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """source: the text with a marker for each image and video, and what errors call it."""

    ids: list[int]
    spans: tuple[ImageSpan, ...]
    images: tuple[PlannedImage, ...]
    videos: tuple[PlannedVideo, ...] = ()
    source: tuple[str, str] = field(default=("", ""), repr=False)

    @property
    def image_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def unsettled(self) -> tuple[PlannedVideo, ...]:
        """Pruned videos whose frames decide what is kept, and nobody has looked at them."""
        return tuple(video for video in self.videos if not video.settled)

    @property
    def planned(self) -> Iterator[Planned]:
        """All that is encoded for this prompt, as far as it is known."""
        yield from self.images
        for video in self.videos:
            if video.settled:
                yield from video.groups

    @property
    def contents(self) -> str:
        """For messages: how many images, and what each video costs."""
        return "; ".join((f"{len(self.images)} images", *(video.cost for video in self.videos)))
