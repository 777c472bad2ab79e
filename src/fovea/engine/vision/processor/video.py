"""Plans and prepares videos for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Frames are sampled, resized to one size, and put into groups; a group has the frames of one temporal patch. A
group is encoded like an image of two different frames, because in Qwen's towers no patch attends to another
group. So a group is the unit of encoding and caching. In the prompt, a video is a run of groups, and the
model knows their times from:

    Qwen2-VL    positions one step apart              (arXiv 2409.12191)
    Qwen2.5-VL  positions in proportion to seconds    (arXiv 2502.13923)
    Qwen3-VL    the text "<1.5 seconds>" before each  (transformers' Qwen3VLProcessor)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL.Image import Resampling

from fovea.core.errors import EngineError, InvalidRequest
from fovea.core.media import Video, VideoBudget
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.budget import expect_dimensions
from fovea.engine.vision.processor.palette import Palette
from fovea.engine.vision.processor.pixels import Bytes
from fovea.engine.vision.processor.pruning import KeptCells, first_cells, kept_count
from fovea.engine.vision.processor.sampling import SamplingRule
from fovea.engine.vision.processor.smart_resize import smart_resize, trim
from fovea.engine.vision.windows import patch_coordinates
from fovea.kernels.native.pictures import Order


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
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        counted = round(frames / group) * group
        if counted * new_height * new_width > high:
            shrink = math.sqrt((frames * height * width) / high)
            return (
                max(factor, math.floor(height / shrink / factor) * factor),
                max(factor, math.floor(width / shrink / factor) * factor),
            )
        if counted * new_height * new_width < low:
            grow = math.sqrt(low / (frames * height * width))
            return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return new_height, new_width
