"""A prepared prompt: its token ids, and the images, videos and frames that are encoded for it.

A planned video has groups of frames, each encoded by itself, and is decoded once for all of them. Requests
share it as a clip.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from fovea.core.errors import InvalidMedia, InvalidVideo
from fovea.core.measure import stage
from fovea.core.media import Image, ImageUse, PixelBudget, Video
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import Bytes, picture, resize
from fovea.engine.vision.processor.video import KeptCells, QwenVideos, VideoPlan, moving_cells
from fovea.engine.visual_budget.methods import METHODS


class Clip:
    """The sampled frames of one video, resized. Thread-safe.

    The frames are decoded at first use and freed when no request has them reserved any more. A later use
    decodes them again. Pruning does not change the frames, so requests that prune differently share a clip.

    name: names these frames in caches.
    pruning_lock: lock under which `Clips` finds the cells that pruning keeps.
    video: the video.
    """

    def __init__(self, name: str, video: Video, plan: VideoPlan, videos: QwenVideos) -> None:
        self.name = name
        self.pruning_lock = threading.Lock()
        self.video = video
        self._indices = plan.indices
        self._size = plan.height, plan.width
        self._videos = videos
        self._frames: list[Bytes] | None = None
        self._reservations = 0
        self._lock = threading.Lock()
        self._decoding_lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the resized frames in memory."""
        return len(set(self._indices)) * self._size[0] * self._size[1] * 3

    def acquire(self) -> None:
        """Count one more reservation of the frames."""
        with self._lock:
            self._reservations += 1

    def release(self) -> None:
        """Count one reservation less. After the last one the frames are freed."""
        with self._lock:
            self._reservations -= 1
            if not self._reservations:
                self._frames = None

    def frames(self) -> list[Bytes]:
        """Return the frames, (height, width, 3) bytes each, in the order of the plan's indices.

        Raises InvalidVideo, and Abandoned if the last reservation was released meanwhile.
        """
        with self._decoding_lock:
            frames = self._frames
            if frames is None:
                frames = list(self._decode())
                with self._lock:
                    self._frames = frames
            return frames

    def most_moving_cells(self, count: int) -> KeptCells:
        """Return the `count` cells, of all groups together, that move most. Raises InvalidVideo."""
        return moving_cells(self.frames(), self._videos.rule.group_frames, self._videos.factor, count)

    def group(self, number: int, plan: VisualPlan) -> ProcessedImage:
        """Return the encoder's input of group `number`, with its visual plan. Raises InvalidVideo."""
        size = self._videos.rule.group_frames
        frames = self.frames()[number * size : (number + 1) * size]
        return self._videos.group(self.video.identity, frames, plan)

    def _decode(self) -> Iterator[Bytes]:
        reserved = self._reservations > 0  # without any reservation, the caller itself waits

        def abandoned() -> bool:
            return reserved and not self._reservations

        video, (height, width) = self.video, self._size
        previous: tuple[int, Bytes] | None = None
        for index, rgb in zip(self._indices, video.source.read(self._indices, abandoned), strict=True):
            if previous is None or previous[0] != index:
                if len(rgb) != video.width * video.height * 3:
                    raise InvalidVideo(f"frame {index} holds {len(rgb)} bytes")
                image = Image("", video.width, video.height, rgb)
                resized = resize(picture(image), height, width, self._videos.resample)
                previous = index, np.ascontiguousarray(resized)
            yield previous[1]


@dataclass(frozen=True, slots=True)
class PlannedFrames:
    """A group of a video's frames and its visual plan.

    The encoder and the caches treat it like a planned image.

    clip: the frames.
    video: number of the video in the request, for errors.
    number: number of the group in the video.
    plan: visual plan of the group.
    key: name of the encoder output in the caches.
    """

    clip: Clip = field(repr=False)
    video: int
    number: int
    plan: VisualPlan
    key: str

    @property
    def pixel_key(self) -> str:
        """The name of the pixels that the encoder reads."""
        return self.key

    def process(self) -> ProcessedImage:
        """Return the pixels of the group. Raises InvalidVideo."""
        try:
            return self.clip.group(self.number, self.plan)
        except InvalidMedia as error:
            raise error.at(self.video) from error


@dataclass(frozen=True, slots=True)
class PlannedVideo:
    """A video of a request, its plan and its frames.

    index: number of the video in the request.
    plan: frames, groups, times and tokens.
    clip: the frames.
    salt: the request's cache salt.
    settled: whether the plan's groups have the tokens that pruning keeps. Otherwise only the number of tokens
        is right, and the groups are placeholders until the frames are decoded.
    """

    index: int
    plan: VideoPlan
    clip: Clip = field(repr=False)
    salt: str = field(repr=False)
    settled: bool = True

    @property
    def groups(self) -> tuple[PlannedFrames, ...]:
        """The groups that keep at least one token."""
        name = f"{self.salt}\x00{self.clip.video.identity}\x00"
        return tuple(
            PlannedFrames(self.clip, self.index, number, group, name + group.key)
            for number, group in enumerate(self.plan.groups)
            if group.tokens
        )

    @property
    def pixel_count(self) -> int:
        """Number of pixels of all groups; the frames of a group count once."""
        return len(self.plan.groups) * self.plan.height * self.plan.width

    @property
    def cost(self) -> str:
        """Frames, size and tokens, for messages."""
        return (
            f"video {self.index}: {len(set(self.plan.indices))} frames of "
            f"{self.plan.width}x{self.plan.height} pixels, {self.plan.kept_tokens} tokens"
        )


CACHE_BYTES = 16 << 20
CELL_BYTES = 40
"""Memory of one number in a tuple."""


class Clips:
    """Registry of clips, and cache of the cells that pruning keeps. Thread-safe.

    Pruning has to decode the frames to find the cells that it keeps. The result is small and is cached
    (LRU), so another question about the video decodes nothing if the encoder outputs are cached, too.

    cache_bytes: ceiling of the cache, in bytes of Python objects.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._capacity = cache_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._clips: WeakValueDictionary[str, Clip] = WeakValueDictionary()
        self._cells: OrderedDict[tuple[str, int], KeptCells] = OrderedDict()

    def clip(self, video: Video, plan: VideoPlan, videos: QwenVideos, salt: str) -> Clip:
        """Return the clip of these frames. Requests with different salts share none."""
        indices = ",".join(map(str, plan.indices))
        name = f"{salt}\x00{video.identity}\x00{plan.height}x{plan.width};{indices}"
        with self._lock:
            clip = self._clips.get(name)
            if clip is None:
                clip = self._clips[name] = Clip(name, video, plan, videos)
            return clip

    def get(self, clip: Clip, count: int) -> KeptCells | None:
        """Return the `count` cells that move most, if they are cached."""
        with self._lock:
            key = clip.name, count
            if key in self._cells:
                self._cells.move_to_end(key)
            return self._cells.get(key)

    def get_or_find(self, clip: Clip, count: int) -> KeptCells:
        """Return the `count` cells that move most.

        If they are not cached, the clip is decoded, once for all callers.

        Raises InvalidVideo. For worker threads.
        """
        with clip.pruning_lock:
            cells = self.get(clip, count)
            if cells is None:
                cells = clip.most_moving_cells(count)
                self._put((clip.name, count), cells)
            return cells

    def _put(self, key: tuple[str, int], cells: KeptCells) -> None:
        with self._lock:
            old = self._cells.pop(key, None)
            self._bytes += _size(key, cells) - (0 if old is None else _size(key, old))
            self._cells[key] = cells
            while self._bytes > self._capacity:
                self._bytes -= _size(*self._cells.popitem(last=False))


def _size(key: tuple[str, int], cells: KeptCells) -> int:
    return len(key[0]) + CELL_BYTES * (sum(map(len, cells)) + len(cells) + 2)


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
                images, 0, 0, plan.tokens, planned.key, plan.grid, full_tokens=full, states=plan.states
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
