"""What this server lets an image or a video cost: every ceiling of the media floor in one frozen value.

It refuses to know how an image is fetched or decoded; the other files ask it for a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError

MIB = 1024 * 1024
SCHEMES = ("data", "http", "https", "file")

# Pillow's own decompression-bomb guard. Staying below it keeps that guard switched on, as a second line
# behind ours, instead of turning off a setting that the whole process shares.
PILLOW_MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_images", 1, 1024),
    ("max_bytes", 1, 1024 * MIB),
    ("max_pixels", 1, PILLOW_MAX_PIXELS),
    ("max_request_pixels", 1, 1 << 34),
    ("max_side", 1, 65535),
    ("min_side", 1, 65535),
    ("max_aspect_ratio", 1, 65535),
    ("max_videos", 1, 64),
    ("max_video_bytes", 1, 1024 * MIB),
    ("max_video_s", 0.001, 86_400),
    ("max_video_frames", 1, 1_000_000),
    ("max_video_frame_pixels", 1, PILLOW_MAX_PIXELS),
    ("decode_threads", 1, 256),
    ("fetch_timeout_s", 0.001, 600),
    ("connect_timeout_s", 0.001, 600),
    ("max_redirects", 0, 20),
    ("max_concurrent_fetches", 1, 4096),
)
_FRACTIONS = ("max_aspect_ratio", "max_video_s", "fetch_timeout_s", "connect_timeout_s")


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """max_images: images in one request. [1, 1024].
    max_bytes: bytes of one encoded image, however it arrives. [1, 1 GiB].
    max_pixels: width times height of one image, read from its header. [1, 89478485], Pillow's own guard.
    max_request_pixels: pixels of all images of a request together; decoded they are 3 bytes each. [1, 2**34].
    max_side: pixels of an image's longer side. [1, 65535].
    min_side: pixels of an image's shorter side. [1, 65535], at most max_side.
    max_aspect_ratio: longer side over shorter side; vision processors refuse more than 200. [1, 65535].
    first_frame_of_animation: show the model the first frame of an animated image instead of refusing it.
    max_videos: videos in one request. [1, 64].
    max_video_bytes: bytes of one encoded video, however it arrives. [1, 1 GiB].
    max_video_s: seconds that a video may last, by its header. (0, 86400].
    max_video_frames: frames of a video's file, sampled or not. [1, 1000000].
    max_video_frame_pixels: width times height of a video's frames, by its header. [1, 89478485].
    decode_threads: threads that read and decode images; none of it happens on the event loop. [1, 256].
    allowed_schemes: what an image URL may begin with, out of data, http, https, file.
    allow_remote: False refuses every http and https URL.
    allowed_hosts: None is any public host; else only these names, "*.example.com" for names beneath one.
    allowed_ports: TCP ports that are contacted; `allow_private_hosts` lifts this.
    allow_private_hosts: also contact private, loopback and link-local addresses. For tests and closed networks.
    max_redirects: hops that a fetch follows, each checked like the first URL. [0, 20].
    fetch_timeout_s: seconds for one image from name resolution to its last byte, all hops. (0, 600].
    connect_timeout_s: seconds for one TCP and TLS connection, within fetch_timeout_s. (0, 600].
    max_concurrent_fetches: downloads at one time; further ones wait. [1, 4096].
    file_root: the folder that file:// URLs may read beneath; None refuses every file:// URL.
    """

    max_images: int = 16
    max_bytes: int = 20 * MIB
    max_pixels: int = 50_000_000
    max_request_pixels: int = 200_000_000
    max_side: int = 16384
    min_side: int = 1
    max_aspect_ratio: float = 200.0
    first_frame_of_animation: bool = False
    max_videos: int = 4
    max_video_bytes: int = 100 * MIB
    max_video_s: float = 600.0
    max_video_frames: int = 36_000
    max_video_frame_pixels: int = 9_000_000
    decode_threads: int = 4
    allowed_schemes: tuple[str, ...] = SCHEMES
    allow_remote: bool = True
    allowed_hosts: tuple[str, ...] | None = None
    allowed_ports: tuple[int, ...] = (80, 443)
    allow_private_hosts: bool = False
    max_redirects: int = 3
    fetch_timeout_s: float = 10.0
    connect_timeout_s: float = 3.0
    max_concurrent_fetches: int = 64
    file_root: Path | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ConfigError naming the field, its value and what is accepted."""
        for name, low, high in _RANGES:
            self._check_number(name, low, high)
        if self.min_side > self.max_side:
            raise ConfigError(
                f"min_side is {self.min_side}; accepted: at most max_side ({self.max_side})", param="min_side"
            )
        for scheme in self.allowed_schemes:
            if scheme not in SCHEMES:
                raise ConfigError(
                    f"allowed_schemes has {scheme!r}; accepted: {', '.join(SCHEMES)}", param="allowed_schemes"
                )
        for port in self.allowed_ports:
            if not 1 <= port <= 65535:
                raise ConfigError(f"allowed_ports has {port}; accepted: 1 to 65535", param="allowed_ports")
        for host in self.allowed_hosts or ():
            _check_host_pattern(host)
        self._check_file_root()

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        kinds = (int, float) if name in _FRACTIONS else (int,)
        # `not low <= value` and not `value < low`: NaN fails both comparisons.
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; accepted: {low:g} to {high:.12g}", param=name)

    def _check_file_root(self) -> None:
        root = self.file_root
        if root is not None and not (root.is_absolute() and root.is_dir()):
            raise ConfigError(
                f"file_root is {str(root)!r}; accepted: the absolute path of a folder", param="file_root"
            )


def _check_host_pattern(host: str) -> None:
    name = host.removeprefix("*.")
    if not name or any(char in name for char in "*/:@ ") or name != name.lower():
        raise ConfigError(
            f"allowed_hosts has {host!r}; accepted: a lower-case name such as example.com, or *.example.com",
            param="allowed_hosts",
        )
