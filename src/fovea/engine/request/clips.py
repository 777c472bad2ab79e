"""Videos that requests share: one clip at a time, and the cells that pruning keeps.

Pruning has to decode the frames to find the cells that it keeps. The result is small and is cached (LRU), so
another question about the video decodes nothing if the encoder outputs are cached, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from weakref import WeakValueDictionary

from fovea.core.media import Video
from fovea.engine.request.clip import Clip
from fovea.engine.vision.processor.pruning import KeptCells
from fovea.engine.vision.processor.video import QwenVideos, VideoPlan

CACHE_BYTES = 16 << 20
CELL_BYTES = 40
"""Memory of one number in a tuple."""


class Clips:
    """Registry of clips, and cache of the cells that pruning keeps. Thread-safe.

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
