"""The images and videos of one request as the media floor loads them, with the time of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fovea.core.image import Image
from fovea.core.video import Video
from fovea.media.image.probe import ImageHeader


class MediaTimings(NamedTuple):
    """Seconds that a request waited for one image or video, including waits for a thread or a download slot.

    fetch_s: from the URL to a checked header, or for a video to its bytes.
    decode_s: from there to pixels, or for a video to an open file.
    """

    fetch_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image's bytes with a header that is within the limits; its pixels are not decoded yet.

    identity: the identity that the decoded image will have.
    url: the URL of downloaded bytes; "" for inline data and files.
    fetch_s: seconds from the URL to the checked header.
    """

    header: ImageHeader
    identity: str
    data: bytes = field(repr=False)
    url: str = ""
    fetch_s: float = 0.0


class ImageBundle(NamedTuple):
    """The decoded images of a request and their timings, both in the order of the URLs."""

    images: tuple[Image, ...]
    timings: tuple[MediaTimings, ...]

    @property
    def wait(self) -> MediaTimings:
        """The time that the request waited. Its images are decoded only after all were fetched."""
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
