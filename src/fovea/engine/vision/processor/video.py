"""Plans and prepares videos for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Frames are sampled, resized to one size, and put into groups; a group has the frames of one temporal patch. A
group is encoded like an image of two different frames, because in Qwen's towers no patch attends to another
group. So a group is the unit of encoding and caching. In the prompt, a video is a run of groups, and the
model knows their times from:

    Qwen2-VL    positions one step apart              (arXiv 2409.12191)
    Qwen2.5-VL  positions in proportion to seconds    (arXiv 2502.13923)
    Qwen3-VL    the text "<1.5 seconds>" before each  (transformers' Qwen3VLProcessor)

`SamplingRule` chooses the frames, `moving_cells` the tokens that pruning keeps, and `build_videos` reads the
settings of a checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from fovea.core.errors import CheckpointError, EngineError, InvalidRequest
from fovea.core.media import FRAMES_PER_SECOND, MAX_PRUNING, Video, VideoBudget
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.pixels import CLIP_MEAN, CLIP_STD, HALF, Bytes, Palette, read_filter
from fovea.engine.vision.processor.settings import Config, Settings, Size, expect_equal, section
from fovea.engine.vision.processor.sizes import (
    expect_dimensions,
    patch_coordinates,
    smart_resize,
    trim,
    within_limits,
)
from fovea.kernels.native.pictures import Order

KeptCells = tuple[tuple[int, ...], ...]
"""For each group, the cells of its merged grid that are kept, ascending."""
MAX_FPS = 240.0
MAX_FRAMES = 4096
FILE = "video_preprocessor_config.json"
TIMESTAMPS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Models whose prompts have the time of each group of frames before it."""
_CLASSES = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    **dict.fromkeys(TIMESTAMPS, "Qwen3VLVideoProcessor"),
}
_WRAP = ("<|vision_start|>", "<|vision_end|>")
SHARE = {False: 128_000, True: 768}
"""Default of `max_video_tokens`, by whether the limits are for all frames together (`QwenVideos.volume`)."""


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """The sampled frames of a video, and the plans of its groups.

    It depends on the video's header and the budget, never on its pixels, with one exception. Which cells
    remain in a pruned video depends on the frames. Until the frames are known, `groups` has some other cells,
    as many in total as will remain; `QwenVideos.settle` then replaces them.

    indices: indices of the sampled frames, ascending. The last one is repeated to fill its group.
    height, width: size of the resized frames, in pixels.
    groups: one plan per group.
    times: the positions in time of each group, relative to the first group.
    is_contiguous: the prompt has no text between the groups.
    kept_tokens: tokens of all groups together, after pruning.
    is_pruned: whether pruning leaves out any token.
    """

    indices: tuple[int, ...]
    height: int
    width: int
    groups: tuple[VisualPlan, ...]
    times: tuple[int, ...]
    is_contiguous: bool
    kept_tokens: int
    is_pruned: bool

    @property
    def text(self) -> str:
        """The text that replaces the video's marker in the prompt."""
        return "".join(group.text for group in self.groups)


@dataclass(frozen=True, slots=True)
class QwenVideos:
    """Plans and prepares the videos of one model.

    palette: normalisation of the pixels.
    resample: the filter that resizes frames.
    resizes: whether frames are resized at all.
    min_pixels, max_pixels: limits of the area after resizing: of all frames together if `volume`, else of one
        frame.
    volume: whether the limits are for all frames together (Qwen3-VL).
    share: tokens that one frame (if `volume`) or the whole video (if not) may have, where the checkpoint caps
        the pixels per frame (`cap_pixels_per_frame`); None: it does not.
    patch: side of an encoder patch, in pixels.
    merge: patches along the side of a window that becomes one token.
    rule: how frames are sampled.
    seconds: positions in time per second of video; 0: groups are one position apart.
    timestamps: whether the prompt has the time in seconds before every group.
    marker: text of one visual token.
    wrap: texts before and after the tokens of a group, where groups have timestamps.
    """

    palette: Palette
    resample: Resampling
    resizes: bool
    min_pixels: int
    max_pixels: int
    volume: bool
    share: int | None
    patch: int
    merge: int
    rule: SamplingRule
    seconds: float
    timestamps: bool
    marker: str
    wrap: tuple[str, str]

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one visual token."""
        return self.patch * self.merge

    def plan(self, video: Video, budget: VideoBudget) -> VideoPlan:
        """Plan a video.

        Raises InvalidRequest for a budget that cannot be met, InvalidImage for unusable dimensions.
        """
        sample = self.rule.indices(video, budget)
        indices = sample + sample[-1:] * (-len(sample) % self.rule.group_frames)
        height, width = self._target(video, len(sample), budget.max_pixels)
        groups = len(indices) // self.rule.group_frames
        cells = height * width // self.factor**2
        count = kept_count(groups, cells, budget.pruning_rate)
        is_pruned = count < groups * cells
        blank = VisualPlan(
            video.width,
            video.height,
            cells,
            (1, height // self.patch, width // self.patch),
            "",
            "",
            ((height, width),),
        )
        plan = VideoPlan(
            indices, height, width, (blank,) * groups, self._times(video, len(sample), groups),
            not self.timestamps, count, is_pruned,
        )  # fmt: skip
        return self.settle(video, plan, first_cells(groups, cells, count) if is_pruned else None)

    def settle(self, video: Video, plan: VideoPlan, kept: KeptCells | None) -> VideoPlan:
        """Return the plan with these cells of every group. kept: None: all cells."""
        groups = []
        for number, group in enumerate(plan.groups):
            cells = None if kept is None else kept[number]
            tokens = plan.height * plan.width // self.factor**2 if cells is None else len(cells)
            frames = plan.indices[number * self.rule.group_frames : (number + 1) * self.rule.group_frames]
            text = self.marker * tokens
            if self.timestamps:
                middle = (frames[0] / video.fps + frames[-1] / video.fps) / 2
                text = f"<{middle:.1f} seconds>{self.wrap[0]}{text}{self.wrap[1]}"
            key = self._key(plan, frames, plan.times[number], cells)
            groups.append(replace(group, tokens=tokens, text=text, key=key, kept_cells=cells))
        return replace(plan, groups=tuple(groups))

    def group(self, identity: str, frames: Sequence[Bytes], plan: VisualPlan) -> ProcessedImage:
        """Prepare the encoder's input of a group.

        identity: of the group.
        frames: resized bytes (height, width, 3), as many as a temporal patch has. "pixel_values" is laid out
            as for an image, with the values of all frames after each other in each channel.

        Raises EngineError for another number of frames.
        """
        if len(frames) != self.rule.group_frames:
            raise EngineError(f"{len(frames)} frames for a group of {self.rule.group_frames}")
        patch = self.patch
        grid = (1, frames[0].shape[0] // patch, frames[0].shape[1] // patch)
        order = Order(patch_coordinates(grid, self.merge) * patch, patch, patch)
        out = np.empty((len(order.places), 3, len(frames), patch * patch), self.palette.table.dtype)
        for time, frame in enumerate(frames):
            self.palette.cut(frame, order, out[:, :, time])
        arrays = {
            "pixel_values": out.reshape(len(out), -1),
            "grid_thw": np.array([plan.grid], dtype=np.int64),
        }
        return ProcessedImage(identity, plan, arrays)

    def _key(self, plan: VideoPlan, frames: tuple[int, ...], time: int, cells: tuple[int, ...] | None) -> str:
        key = (
            f"video;{plan.height}x{plan.width};{self.resample.name};{self.palette.key};patch={self.patch};"
            f"merge={self.merge};frames={','.join(map(str, frames))};time={time}"
        )
        if cells is None:
            return key
        return f"{key};kept={hashlib.sha256(str(cells).encode()).hexdigest()}"

    def _times(self, video: Video, sampled: int, groups: int) -> tuple[int, ...]:
        if self.timestamps:
            return (0,) * groups
        if not self.seconds:
            return tuple(range(groups))
        # transformers computes this in single precision and cuts fractions off, so a higher precision could
        # differ by 1.
        step = np.float32(self.rule.group_frames / (sampled / video.frames * video.fps)) * np.float32(
            self.seconds
        )
        return tuple((np.arange(groups, dtype=np.float32) * step).astype(np.int64).tolist())

    def _target(self, video: Video, frames: int, most: int | None) -> tuple[int, int]:
        """(height, width) of every frame. most: the client's bound on the pixels of a frame."""
        expect_dimensions(video.width, video.height, aspect=True)
        if not self.resizes:
            if video.height % self.factor or video.width % self.factor:
                raise InvalidRequest(
                    f"the video's frames are {video.width}x{video.height} pixels; this model does not "
                    f"resize, so both edges must be multiples of {self.factor}"
                )
            return video.height, video.width
        if most is not None and most < self.factor**2:
            raise InvalidRequest(
                f"max_pixels is {most}; this model accepts at least {self.factor**2} (one token) per frame",
                param="max_pixels",
            )
        size = self._volume(video, frames, most) if self.volume else self._area(video, frames, most)
        return size if most is None else trim(*size, self.factor, most)

    def _area(self, video: Video, frames: int, most: int | None) -> tuple[int, int]:
        high = self.max_pixels
        if self.share is not None:
            total = int(self.share * self.factor**2 * 0.9)
            high = max(min(high, total * self.rule.group_frames // frames), int(self.min_pixels * 1.05))
        high = min(high, most or high)
        return smart_resize(video.height, video.width, self.factor, min(self.min_pixels, high), high)

    def _volume(self, video: Video, frames: int, most: int | None) -> tuple[int, int]:
        """The rounding of Qwen3-VL, whose limits are for the pixels of all frames together."""
        # A single frame is repeated to fill its group.
        frames, group, factor = max(frames, self.rule.group_frames), self.rule.group_frames, self.factor
        high = self.max_pixels
        if self.share is not None:
            each = max(min(self.share * factor**2, high // frames), int(self.min_pixels * 1.05))
            high = each * frames
        high = min(high, (most or high) * frames)
        low = min(self.min_pixels, high)
        height, width = video.height, video.width
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        rounded = round(height / factor) * factor, round(width / factor) * factor
        counted = round(frames / group) * group
        return within_limits(height, width, rounded, factor, low, high, frames=frames, counted=counted)


def build_videos(
    model_type: str, video_config: Config, preprocessor: Config, model: Config, processor: Config
) -> QwenVideos | None:
    """Build the video processor; None for architectures without video.

    video_config: the checkpoint's video_preprocessor_config.json. If it is empty, `video_processor` in
        processor_config.json is used, and without that the image processor's settings.

    Raises CheckpointError for settings that are not supported.
    """
    if model_type not in _CLASSES:
        return None
    source = video_config or processor.get("video_processor") or preprocessor
    settings = Settings(source, FILE)
    kind = str(settings.raw("video_processor_type") or _CLASSES[model_type])
    if kind not in _CLASSES.values():
        raise settings.error("video_processor_type", kind, ", ".join(sorted(set(_CLASSES.values()))))
    volume = kind == "Qwen3VLVideoProcessor"
    vision = section(model, "vision_config")
    patch = settings.count("patch_size", int(vision.get("patch_size") or (16 if volume else 14)))
    merge = settings.count("merge_size", int(vision.get("spatial_merge_size") or 2))
    group_frames = settings.count("temporal_patch_size", int(vision.get("temporal_patch_size") or 2))
    expect_equal("patch_size", patch, vision.get("patch_size"))
    expect_equal("merge_size", merge, vision.get("spatial_merge_size"))
    expect_equal("temporal_patch_size", group_frames, vision.get("temporal_patch_size"))
    low, high = _limits(settings, volume)
    capped = settings.flag("cap_pixels_per_frame", False)
    share = settings.count("max_video_tokens", SHARE[volume])
    videos = QwenVideos(
        palette=Palette.read(settings, *((HALF, HALF) if volume else (CLIP_MEAN, CLIP_STD))),
        resample=read_filter(settings, Resampling.BICUBIC),
        resizes=settings.flag("do_resize", True),
        min_pixels=low,
        max_pixels=high,
        volume=volume,
        share=share if capped else None,
        patch=patch,
        merge=merge,
        rule=_rule(settings, group_frames, volume),
        seconds=_seconds(vision, model_type),
        timestamps=model_type in TIMESTAMPS,
        marker=str(processor.get("video_token") or "<|video_pad|>"),
        wrap=_WRAP,
    )
    settings.close()
    return videos


def kept_count(groups: int, cells: int, rate: float) -> int:
    """Number of tokens that a clip keeps: at least one whole group; all tokens at rate 0."""
    return max(cells, int(groups * cells * (1 - rate))) if rate else groups * cells


def first_cells(groups: int, cells: int, count: int) -> KeptCells:
    """The first `count` cells of a clip.

    They stand for the cells that will remain in a prompt until the frames are decoded.
    """
    return tuple(tuple(range(max(0, min(cells, count - group * cells)))) for group in range(groups))


def moving_cells(frames: Iterable[NDArray[np.uint8]], group_frames: int, cell: int, count: int) -> KeptCells:
    """The `count` cells whose pixels change most, and all of the first group.

    Source: "Efficient Video Sampling" (arXiv 2510.14624). The score of a cell is the change of its pixels
    since the previous frame. The first group is kept whole. The cells with the highest scores of the
    whole clip take the remaining tokens. Unlike in that paper, the number of tokens follows from shape
    and rate alone, so a request's cost is known before a frame is decoded; the pixels only decide which
    cells remain. The remaining tokens keep their true positions.

    Among cells of equal change, an earlier group comes first, then a higher row, then a column further left.
    The scores are integers, so equal frames always keep equal cells.

    frames: (height, width, 3) each; both sides are multiples of `cell`.
    group_frames: frames per group.
    cell: side of a cell, in pixels.
    """
    before: NDArray[np.int16] | None = None
    scores: list[NDArray[np.int64]] = []
    for index, frame in enumerate(frames):
        now = frame.astype(np.int16)
        down, across = now.shape[0] // cell, now.shape[1] // cell
        if before is None:
            change = np.zeros((down, across), np.int64)
        else:
            difference = np.abs(now - before).reshape(down, cell, across, cell * 3)
            change = difference.sum(axis=(1, 3), dtype=np.int64)
        before = now
        if index % group_frames:
            scores[-1] += change.ravel()
        else:
            scores.append(change.ravel())
    table = np.stack(scores)
    table[0] = np.iinfo(np.int64).max
    best = np.zeros(table.size, bool)
    best[np.argsort(-table.ravel(), kind="stable")[:count]] = True
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in best.reshape(table.shape))


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How a model samples the frames of a video.

    The rule is the model's own, with the client's numbers if the request has any. Both rules choose
    exactly the frames that transformers' video processors choose for these numbers (`sample_frames`).

    fps: sampled frames per second of video.
    min_frames, max_frames: bounds on the number of sampled frames.
    group_frames: frames of a temporal patch.
    even: true: frames at equal distances from the first to the last (Qwen3-VL). False: frames at equal
        distances from the first on, in whole temporal patches (Qwen2-VL, Qwen2.5-VL).
    """

    fps: float
    min_frames: int
    max_frames: int
    group_frames: int
    even: bool

    def indices(self, video: Video, budget: VideoBudget) -> tuple[int, ...]:
        """Indices of the sampled frames, ascending.

        Raises InvalidRequest for a budget with values out of range.

        A clip that the client has already sampled (`preselected`) keeps all frames, unless the budget names a
        number or there are more than `max_frames`.
        """
        _check(budget)
        rule = replace(
            self,
            fps=budget.fps or self.fps,
            min_frames=budget.min_frames or min(self.min_frames, budget.max_frames or self.min_frames),
            max_frames=budget.max_frames or max(self.max_frames, budget.min_frames or 0),
        )
        explicit = budget.fps or budget.min_frames or budget.max_frames
        if video.preselected and not explicit and video.frames <= rule.max_frames:
            return tuple(range(video.frames))
        return rule._even(video) if self.even else rule._steps(video)

    def _even(self, video: Video) -> tuple[int, ...]:
        wanted = int(video.frames / video.fps * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, video.frames)
        return tuple(np.linspace(0, video.frames - 1, count).round().astype(int).tolist())

    def _steps(self, video: Video) -> tuple[int, ...]:
        total, whole = video.frames, self.group_frames
        most = min(self.max_frames, total) // whole * whole
        wanted = min(max(total / video.fps * self.fps, self.min_frames), most)
        # If less than one temporal patch is available, take all frames. The last one is repeated to fill the
        # patch.
        count = math.floor(wanted / whole) * whole or min(self.max_frames, total)
        step = total / count
        steps = np.arange(math.ceil(total / step)) * step
        return tuple(np.minimum(steps.astype(np.float32).astype(int), total - 1).tolist())


def _check(budget: VideoBudget) -> None:
    if budget.fps is not None and not 0 < budget.fps <= MAX_FPS:
        raise InvalidRequest(f"fps is {budget.fps!r}; accepted: above 0, at most {MAX_FPS:g}", param="fps")
    for name, value in (("min_frames", budget.min_frames), ("max_frames", budget.max_frames)):
        if value is not None and not 1 <= value <= MAX_FRAMES:
            raise InvalidRequest(f"{name} is {value!r}; accepted: 1 to {MAX_FRAMES}", param=name)
    low, high = budget.min_frames, budget.max_frames
    if low is not None and high is not None and low > high:
        raise InvalidRequest(f"min_frames is {low}, above max_frames, which is {high}", param="min_frames")
    if not 0 <= budget.pruning_rate <= MAX_PRUNING:
        raise InvalidRequest(
            f"video_pruning_rate is {budget.pruning_rate!r}; accepted: 0 to {MAX_PRUNING}",
            param="video_pruning_rate",
        )


def _rule(settings: Settings, group_frames: int, even: bool) -> SamplingRule:
    if settings.raw("num_frames") is not None:
        raise settings.error(
            "num_frames", settings.raw("num_frames"), "no num_frames; fps, min_frames and max_frames instead"
        )
    fps = settings.number("fps", FRAMES_PER_SECOND)
    least, most = settings.count("min_frames", 4), settings.count("max_frames", 768)
    if fps <= 0 or least > most:
        raise settings.error("fps", (fps, least, most), "fps above 0, min_frames at most max_frames")
    return SamplingRule(fps, least, most, group_frames, even)


def _seconds(vision: Config, model_type: str) -> float:
    """Positions in time per second of video. Only Qwen2.5-VL has them; 0 for the others."""
    return float(vision.get("tokens_per_second") or 4) if model_type == "qwen2_5_vl" else 0.0


def _limits(settings: Settings, volume: bool) -> tuple[int, int]:
    edge = 32 if volume else 28
    size = settings.size("size", Size(shortest_edge=128 * edge**2, longest_edge=768 * edge**2))
    assert size is not None
    low = settings.count("min_pixels", size.shortest_edge or size.min_pixels or 0)
    high = settings.count("max_pixels", size.longest_edge or size.max_pixels or 0)
    if not low or not high or low > high:
        raise CheckpointError(
            f"{FILE}: size is {size}; accepted: areas shortest_edge <= longest_edge in pixels", param="size"
        )
    return low, high
