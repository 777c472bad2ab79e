"""The two kinds of media that a client may send, images and videos.

`source`, `files` and `fetch` check both in the same way; only the words of their errors and the ceilings
differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidVideo
from fovea.media.limits import MediaLimits


@dataclass(frozen=True, slots=True)
class Kind:
    """Names and ceilings of one kind of media.

    noun: its name in messages and error codes.
    error: class of its errors.
    example: the beginning of a data: URL.
    accept: the Accept header of its downloads.
    """

    noun: str
    error: type[InvalidMedia]
    example: str
    accept: str

    def invalid(self, message: str, code: str | None = None) -> InvalidMedia:
        """Return an error of this kind. code: an error code in which {noun} stands for the noun."""
        return self.error(message, code=code.format(noun=self.noun) if code else None)

    def max_bytes(self, limits: MediaLimits) -> int:
        return limits.max_video_bytes if self.error is InvalidVideo else limits.max_bytes


IMAGE = Kind(
    "image", InvalidImage, "data:image/png;base64,", "image/png, image/jpeg, image/webp, image/gif, image/bmp"
)
VIDEO = Kind("video", InvalidVideo, "data:video/mp4;base64,", "video/mp4, video/webm")
