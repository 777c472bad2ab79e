"""All limits of the media floor on images, videos and downloads, in one frozen value.

This module does not know how an image is fetched or decoded; the other modules only read numbers from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
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
    decode_threads: int = setting(
        4, "Threads that read and decode media; the event loop does neither.", low=1, high=256
    )
    allowed_schemes: tuple[str, ...] = setting(
        SCHEMES, "Accepted URL schemes, out of data, http, https, file.", choices=SCHEMES
    )
    allow_remote: bool = setting(True, "false refuses every http and https URL.")
    allowed_hosts: tuple[str, ...] | None = setting(
        None,
        "Host names that may be contacted; *.example.com means all names beneath example.com. "
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
    max_concurrent_fetches: int = setting(64, "Simultaneous downloads; further ones wait.", low=1, high=4096)
    file_root: Path | None = setting(
        None, "Folder beneath which file:// URLs may read. none refuses every file:// URL.", check=_file_root
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.min_side > self.max_side:
            raise ConfigError(
                f"min_side is {self.min_side}; accepted: at most max_side ({self.max_side})", param="min_side"
            )
