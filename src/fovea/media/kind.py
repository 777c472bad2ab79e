"""The two things that a client may send to be looked at, and how errors speak of each.

What guards the way in (`source`, `files`, `fetch`) is the same for both; only the words and the ceiling differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidVideo
from fovea.media.limits import MediaLimits


@dataclass(frozen=True, slots=True)
class Kind:
    """noun: as messages and codes name it. example: a data: URL's beginning. accept: the header of a fetch."""

    noun: str
    error: type[InvalidMedia]
    example: str
    accept: str

    def invalid(self, message: str, code: str | None = None) -> InvalidMedia:
        """code: with {noun} for the noun."""
        return self.error(message, code=code.format(noun=self.noun) if code else None)

    def max_bytes(self, limits: MediaLimits) -> int:
        return limits.max_video_bytes if self.error is InvalidVideo else limits.max_bytes


IMAGE = Kind(
    "image", InvalidImage, "data:image/png;base64,", "image/png, image/jpeg, image/webp, image/gif, image/bmp"
)
VIDEO = Kind("video", InvalidVideo, "data:video/mp4;base64,", "video/mp4, video/webm")
