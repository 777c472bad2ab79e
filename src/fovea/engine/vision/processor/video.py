"""Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: sampled frames, resized together, in groups of a temporal patch.

A group is encoded like an image of two different frames: Qwen's towers let no patch see another group. So a group is
the unit of encoding and caching, and a video is a run of groups in the prompt, told apart by time:

    Qwen2-VL    positions one step apart            (arXiv 2409.12191)
    Qwen2.5-VL  positions apart by seconds          (arXiv 2502.13923)
    Qwen3-VL    "<1.5 seconds>" before every group  (transformers' Qwen3VLProcessor)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL.Image import Resampling

from fovea.core.errors import EngineError, InvalidRequest
from fovea.core.video import Video, VideoBudget
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.budget import expect_dimensions
from fovea.engine.vision.processor.palette import Palette
from fovea.engine.vision.processor.pixels import Bytes
from fovea.engine.vision.processor.pruning import Kept, first_cells, kept_count
from fovea.engine.vision.processor.qwen import smart_resize, trim
from fovea.engine.vision.processor.sampling import SamplingRule


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """What will be made of a video; depends on its header and budget, never on its pixels, but for `groups` of a
    pruned one, which stand for any others of as many tokens until the frames are known (`Videos.settle`).

    indices: sampled frames, ascending, the last repeated to fill its group. height, width: after resizing, in pixels.
    groups: a plan each. times: how far each group's positions in time are ahead of the first's.
    joined: the groups follow one another in the prompt without text between.
    kept: tokens of all groups together. pruned: fewer than there are.
    """

    indices: tuple[int, ...]
    height: int
    width: int
    groups: tuple[VisualPlan, ...]
    times: tuple[int, ...]
    joined: bool
    kept: int
    pruned: bool

    @property
    def text(self) -> str:
        return "".join(group.text for group in self.groups)


@dataclass(frozen=True, slots=True)
class QwenVideos:
    """min_pixels, max_pixels: limits after resizing; of all frames together where `volume`, else of one.
    share: None, or how the limit is divided among frames (`cap_pixels_per_frame`): tokens that a frame, where
    `volume`, or else a video may have.
    seconds: positions in time per second, 0 where groups are one apart. stamped: seconds are written before groups.
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
    stamped: bool
    marker: str
    wrap: tuple[str, str]

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    def plan(self, video: Video, budget: VideoBudget) -> VideoPlan:
        """Raises InvalidRequest for a budget that cannot be met, InvalidImage for unusable dimensions."""
        chosen = self.rule.indices(video, budget)
        together = self.rule.together
        padded = chosen + chosen[-1:] * (-len(chosen) % together)
        height, width = self._target(video, len(chosen), budget.max_pixels)
        groups = len(padded) // together
        cells = height * width // self.factor**2
        kept = kept_count(groups, cells, budget.pruning_rate)
        pruned = kept < groups * cells
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
            padded, height, width, (blank,) * groups, self._times(video, len(chosen), groups), not self.stamped,
            kept, pruned,
        )  # fmt: skip
        return self.settle(video, plan, first_cells(groups, cells, kept) if pruned else None)

    def settle(self, video: Video, plan: VideoPlan, kept: Kept | None) -> VideoPlan:
        """The plan with these cells of every group; None: all of them."""
        made = []
        for number, group in enumerate(plan.groups):
            cells = None if kept is None else kept[number]
            tokens = plan.height * plan.width // self.factor**2 if cells is None else len(cells)
            frames = plan.indices[number * self.rule.together : (number + 1) * self.rule.together]
            text = self.marker * tokens
            if self.stamped:
                middle = (frames[0] / video.fps + frames[-1] / video.fps) / 2
                text = f"<{middle:.1f} seconds>{self.wrap[0]}{text}{self.wrap[1]}"
            key = self._key(plan, frames, plan.times[number], cells)
            made.append(replace(group, tokens=tokens, text=text, key=key, kept=cells))
        return replace(plan, groups=tuple(made))

    def group(self, identity: str, frames: Sequence[Bytes], plan: VisualPlan) -> ProcessedImage:
        """frames: (height, width, 3) each, resized; as many as a temporal patch has. Pixels as an image's, where each
        copy in time is a frame of its own."""
        if len(frames) != self.rule.together:
            raise EngineError(f"{len(frames)} frames for a group of {self.rule.together}")
        patch, merge = self.patch, self.merge
        down, across = frames[0].shape[0] // self.factor, frames[0].shape[1] // self.factor
        out = np.empty((down * across * merge**2, 3, len(frames), patch * patch), np.float32)
        for time, frame in enumerate(frames):
            windows = frame.reshape(down, merge, patch, across, merge, patch, 3).transpose(
                0, 3, 1, 4, 6, 2, 5
            )
            planes = np.ascontiguousarray(windows).reshape(-1, 3, patch * patch)
            self.palette.paint(planes, out[:, :, time : time + 1])
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
        if self.stamped:
            return (0,) * groups
        if not self.seconds:
            return tuple(range(groups))
        # In single precision, as transformers counts: a product just below a whole number is cut down.
        step = np.float32(self.rule.together / (sampled / video.frames * video.fps)) * np.float32(
            self.seconds
        )
        return tuple((np.arange(groups, dtype=np.float32) * step).astype(np.int64).tolist())

    def _target(self, video: Video, frames: int, most: int | None) -> tuple[int, int]:
        """(height, width) of every frame. most: the client's bound on the pixels of one."""
        expect_dimensions(video.width, video.height, aspect=True)
        if not self.resizes:
            if video.height % self.factor or video.width % self.factor:
                raise InvalidRequest(
                    f"the video's frames are {video.width}x{video.height} pixels; this model does not resize, so both "
                    f"edges must be multiples of {self.factor}"
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
            high = max(min(high, total * self.rule.together // frames), int(self.min_pixels * 1.05))
        high = min(high, most or high)
        return smart_resize(video.height, video.width, self.factor, min(self.min_pixels, high), high)

    def _volume(self, video: Video, frames: int, most: int | None) -> tuple[int, int]:
        """Qwen3-VL's rounding: the limits are on the pixels of all frames together."""
        # One frame alone is shown twice.
        frames, together, factor = max(frames, self.rule.together), self.rule.together, self.factor
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
        counted = round(frames / together) * together
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
