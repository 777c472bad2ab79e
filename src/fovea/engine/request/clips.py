"""Videos that requests share: one clip, decoded once, for all who ask at a time, and what pruning left, for all who come later.

Which cells of a pruned video are kept is a look at its frames. The answer is small and is remembered, least recently used
out first, so that another question about the video decodes nothing where the encoder's outputs are known, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from fovea.core.video import Video
from fovea.engine.request.clip import Clip
from fovea.engine.vision.processor.pruning import Kept
from fovea.engine.vision.processor.video import QwenVideos, VideoPlan

KEPT_BYTES = 16 << 20
CELL_BYTES = 40
"""A number in a tuple."""


class Clips:
    """Thread-safe. kept_bytes: ceiling of what is remembered of pruned videos, as Python holds it."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._capacity = kept_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._clips: WeakValueDictionary[str, Clip] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[str, int], Kept] = OrderedDict()

    def clip(self, video: Video, plan: VideoPlan, videos: QwenVideos, salt: str) -> Clip:
        """The clip of these frames. Tenants share none."""
        indices = ",".join(map(str, plan.indices))
        name = f"{salt}\x00{video.identity}\x00{plan.height}x{plan.width};{indices}"
        with self._lock:
            clip = self._clips.get(name)
            if clip is None:
                clip = self._clips[name] = Clip(name, video, plan, videos)
            return clip

    def known(self, clip: Clip, count: int) -> Kept | None:
        """The `count` cells that move most, if somebody has looked already."""
        with self._lock:
            key = clip.name, count
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def look(self, clip: Clip, count: int) -> Kept:
        """The same, by decoding the clip if need be; once, however many look. Raises InvalidVideo. For worker threads."""
        with clip.looking:
            kept = self.known(clip, count)
            if kept is None:
                kept = clip.moving(count)
                self._remember((clip.name, count), kept)
            return kept

    def _remember(self, key: tuple[str, int], kept: Kept) -> None:
        with self._lock:
            old = self._kept.pop(key, None)
            self._bytes += _size(key, kept) - (0 if old is None else _size(key, old))
            self._kept[key] = kept
            while self._bytes > self._capacity:
                self._bytes -= _size(*self._kept.popitem(last=False))


def _size(key: tuple[str, int], kept: Kept) -> int:
    return len(key[0]) + CELL_BYTES * (sum(map(len, kept)) + len(kept) + 2)
