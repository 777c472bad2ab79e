"""The images and videos of one request as the media floor loads them, with the time of each step."""

from __future__ import annotations

from typing import NamedTuple

from fovea.core.image import Image
from fovea.core.video import Video


class MediaTimings(NamedTuple):
    """Seconds that a request waited for one image or video, including waits for a thread or a download slot.

    fetch_s: from the URL to a checked header, or for a video to its bytes.
    decode_s: from there to an open file, for a video. 0 for an image, which is decoded when its pixels are
        needed.
    """

    fetch_s: float
    decode_s: float


class ImageBundle(NamedTuple):
    """The images of a request and their timings, both in the order of the URLs."""

    images: tuple[Image, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """The time that the request waited."""
        return MediaTimings(
            max((timing.fetch_s for timing in self.timings), default=0.0),
            max((timing.decode_s for timing in self.timings), default=0.0),
        )


class VideoBundle(NamedTuple):
    """The open videos of a request and their timings, both in the order of the URLs."""

    videos: tuple[Video, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """The time that the request waited: the time of the slowest video."""
        return max(self.timings, key=sum, default=MediaTimings(0.0, 0.0))
