"""What is known of a request's images and videos on their way in, and how long each step of it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fovea.core.image import Image
from fovea.core.video import Video
from fovea.media.image.probe import ImageHeader


class MediaTimings(NamedTuple):
    """Seconds for one image or video. fetch_s: from URL to a checked header, of a video to its bytes. decode_s: from
    there to pixels, or to an open file.

    Both hold the wait for a thread or a download slot: it is what the request waited.
    """

    fetch_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image's bytes with a header that is within the limits; its pixels are not decoded yet.

    url: where they were fetched; "" for those that were not.
    """

    header: ImageHeader
    identity: str
    data: bytes = field(repr=False)
    url: str = ""
    fetch_s: float = 0.0


class ImageBundle(NamedTuple):
    """Both in the order of the URLs."""

    images: tuple[Image, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """What the request waited: none is decoded before all were fetched."""
        return MediaTimings(
            max((timing.fetch_s for timing in self.timings), default=0.0),
            max((timing.decode_s for timing in self.timings), default=0.0),
        )


class VideoBundle(NamedTuple):
    """Both in the order of the URLs."""

    videos: tuple[Video, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """What the request waited: for the one that took longest."""
        return max(self.timings, key=sum, default=MediaTimings(0.0, 0.0))
