"""Chooses the frames of a video that a model gets.

The rule is the model's own, with the client's numbers if the request has any.
Both rules choose exactly the frames that transformers' video processors choose for these numbers
(`sample_frames`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fovea.core.errors import InvalidRequest
from fovea.core.media import MAX_PRUNING, Video, VideoBudget

MAX_FPS = 240.0
MAX_FRAMES = 4096


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How a model samples the frames of a video.

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
