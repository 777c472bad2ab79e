"""Limits on images, videos and downloads in one frozen value, and the two kinds of media they apply to.

This module does not know how an image is fetched or decoded. `Kind` holds what differs between images and
videos where both are checked in the same way (`source`, `fetch`): the words of errors, and the ceilings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError, InvalidImage, InvalidMedia, InvalidVideo
from fovea.core.settings import check_settings, setting

MIB = 1024 * 1024
SCHEMES = ("data", "http", "https", "file")

# Pillow's own limit against decompression bombs. Limits below it leave that check active behind Fovea's own,
# and need no change of a setting that the whole process shares.
PILLOW_MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3


def _host(host: str) -> str:
    name = host.removeprefix("*.")
    good = name and not any(char in name for char in "*/:@ ") and name == name.lower()
    return "" if good else "a lower-case name such as example.com, or *.example.com"


def _file_root(root: Path) -> str:
    return "" if root.is_absolute() and root.is_dir() else "the absolute path of a folder"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits on images, videos and downloads."""

    max_images: int = setting(16, "Images in one request.", low=1, high=1024)
    max_bytes: int = setting(
        20 * MIB, "Bytes of one encoded image, however it arrives.", low=1, high=1024 * MIB
    )
    max_pixels: int = setting(
        50_000_000, "Width times height of one image, read from its header.", low=1, high=PILLOW_MAX_PIXELS
    )
    max_request_pixels: int = setting(
        200_000_000,
        "Pixels of all images of a request together; a decoded pixel takes 3 bytes.",
        low=1,
        high=1 << 34,
    )
    max_side: int = setting(16384, "Pixels of an image's longer side.", low=1, high=65535)
    min_side: int = setting(1, "Pixels of an image's shorter side.", low=1, high=65535)
    max_aspect_ratio: float = setting(
        200.0, "Longer side over shorter side; vision processors refuse more than 200.", low=1, high=65535
    )
    first_frame_of_animation: bool = setting(
        False, "Give the model the first frame of an animated image instead of refusing the image."
    )
    max_videos: int = setting(4, "Videos in one request.", low=1, high=64)
    max_video_bytes: int = setting(
        100 * MIB, "Bytes of one encoded video, however it arrives.", low=1, high=1024 * MIB
    )
    max_video_s: float = setting(
        600.0, "Seconds that a video may last, by its header.", low=0.001, high=86400
    )
    max_video_frames: int = setting(36_000, "Frames of a video's file, sampled or not.", low=1, high=1000000)
    max_video_frame_pixels: int = setting(
        9_000_000, "Width times height of a video's frames, by its header.", low=1, high=PILLOW_MAX_PIXELS
    )
    max_video_decode_mpx: int = setting(
        20_000,
        "Megapixels that may be decoded for the frames of one video. To read a frame, all frames since the "
        "last key frame are decoded.",
        low=1,
        high=1 << 30,
    )
    max_media_mib: int = setting(
        1024, "MiB of encoded images and videos that requests in flight may hold.", low=1, high=1 << 20
    )
    decode_threads: int = setting(
        4, "Threads that read and check media; the event loop does neither.", low=1, high=256
    )
    image_workers: int = setting(
        3, "Processes that decode images. 0: the server itself, without protection.", low=0, high=256
    )
    video_workers: int = setting(
        2, "Processes that decode videos. 0: the server itself, without protection.", low=0, high=256
    )
    image_decode_s: float = setting(
        20.0, "Seconds that decoding one image may take; then its process is ended.", low=0.1, high=3600
    )
    video_decode_s: float = setting(
        60.0,
        "Seconds that decoding one video's frames may take; then its process is ended.",
        low=0.1,
        high=3600,
    )
    pdf_workers: int = setting(
        1, "Processes that draw pages of PDF files. 0: PDF files are refused.", low=0, high=256
    )
    pdf_render_s: float = setting(
        30.0, "Seconds that drawing the pages of one call may take; then its process is ended.",
        low=0.1, high=3600,
    )  # fmt: skip
    max_pdf_pages: int = setting(32, "Pages of a PDF file that one call may draw.", low=1, high=1024)
    decode_memory_mib: int = setting(
        1024, "MiB that a decoding process may take beyond what it has at its start.", low=64, high=1 << 20
    )
    allowed_schemes: tuple[str, ...] = setting(
        SCHEMES, "Accepted URL schemes, out of data, http, https, file.", choices=SCHEMES
    )
    allow_remote: bool = setting(True, "false refuses every http and https URL.")
    allowed_hosts: tuple[str, ...] | None = setting(
        None,
        "Host names that may be contacted; *.example.com means all names below example.com. "
        "none: every public host.",
        check=_host,
    )
    allowed_ports: tuple[int, ...] = setting(
        (80, 443),
        "TCP ports that may be contacted; every port if allow_private_hosts is set.",
        low=1,
        high=65535,
    )
    allow_private_hosts: bool = setting(
        False, "Also contact private, loopback and link-local addresses. For tests and closed networks."
    )
    max_redirects: int = setting(
        3, "Redirects that a download follows; each target is checked like the first URL.", low=0, high=20
    )
    fetch_timeout_s: float = setting(
        10.0,
        "Seconds for one download from name resolution to its last byte, all redirects.",
        low=0.001,
        high=600,
    )
    connect_timeout_s: float = setting(
        3.0, "Seconds for one TCP and TLS connection, within fetch_timeout_s.", low=0.001, high=600
    )
    resolve_timeout_s: float = setting(
        3.0, "Seconds for the lookup of a host name, within fetch_timeout_s.", low=0.001, high=600
    )
    max_lookups: int = setting(
        32, "Simultaneous lookups of host names; one site gets an eighth of them.", low=1, high=1024
    )
    max_concurrent_fetches: int = setting(64, "Simultaneous downloads; further ones wait.", low=1, high=4096)
    max_fetches_per_host: int = setting(
        16,
        "Simultaneous downloads from one site, which is a domain with all names below it.",
        low=1,
        high=4096,
    )
    max_fetching_mib: int = setting(
        256,
        "MiB of all unfinished downloads together. Beyond that, the largest one is refused.",
        low=1,
        high=1 << 20,
    )
    file_root: Path | None = setting(
        None, "Folder that file:// URLs may read. none refuses every file:// URL.", check=_file_root
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.min_side > self.max_side:
            raise ConfigError(
                f"min_side is {self.min_side}; accepted: at most max_side ({self.max_side})", param="min_side"
            )
        largest = max(self.max_bytes, self.max_video_bytes)
        if self.allow_remote and self.max_fetching_mib * MIB < largest:
            raise ConfigError(
                f"max_fetching_mib is {self.max_fetching_mib}; accepted: at least {-(-largest // MIB)}, so "
                "that one file of max_bytes or max_video_bytes fits",
                param="max_fetching_mib",
            )


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


MOST_QUOTED = 100
"""Characters of a client's text that a message shows."""


def quote(text: str) -> str:
    """Return a text in quotes, with control characters escaped. A long one keeps its first MOST_QUOTED ones.

    A client that sent 8 KB would otherwise get all of it back, and the log would hold it, too.
    """
    return repr(text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}...")
