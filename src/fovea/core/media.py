"""Images and videos as the media package hands them to the engine, and the client's settings for each.

Pixels are plain bytes, so that packages need not agree on an array library. They need not exist yet: an image
is decoded when its pixels are read. A video is passed on undecoded, as its size, its frame rate and a source
of frames. The model's sampling rule and the client's settings choose the frames, and only those are decoded,
after the request was admitted by its cost. `Payload` is a file inside a request before it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Final, Literal, Protocol

from fovea.core.errors import InvalidImage, InvalidRequest

Rgb = bytes | memoryview
"""Pixels in memory: `height * width * 3` bytes, row-major, channels last."""
Level = Literal["low", "medium", "high"]
LEVELS: tuple[Level, ...] = ("low", "medium", "high")
Detail = Literal["auto", "low", "medium", "high"]
DETAILS: tuple[Detail, ...] = ("auto", *LEVELS)
MAX_PRUNING = 0.95
FRAMES_PER_SECOND = 2.0
"""The frame rate of a video that is sent as pictures without a rate."""


class PixelSource(Protocol):
    """Decodes the pixels of one image when they are needed. Thread-safe."""

    @property
    def seconds(self) -> float:
        """Seconds that decoding took the last time; 0 if nothing was decoded yet."""
        ...

    @property
    def size(self) -> int:
        """Bytes of memory that the source holds."""
        ...

    def read(self) -> Rgb:
        """Return the RGB bytes of the image. CPU-bound: call in a worker thread. Raises InvalidImage."""
        ...

    def file(self) -> bytes:
        """Return the file that the image is decoded from. For a worker thread."""
        ...


class UnreadPixels:
    """Stands for the pixels of an image of which only the header was read. It is a `PixelSource`.

    A render describes a prompt from headers alone. What would need pixels fails with an error that says so.
    """

    __slots__ = ()
    seconds = 0.0
    size = 0

    def read(self) -> Rgb:
        """Raise InvalidRequest."""
        raise needs_pixels(
            "the pixels of an image decide how many visual tokens it gets here (the method relevance without "
            "a share or with keep auto, or several images that share a budget by the method views)",
            "visual_tokens",
        )

    def file(self) -> bytes:
        """Raise InvalidRequest, as `read` does."""
        return bytes(self.read())


def needs_pixels(reason: str, param: str) -> InvalidRequest:
    """Return the error of a render whose result depends on pixels. reason: why it does."""
    return InvalidRequest(
        f"{reason}, and a render reads no pixels; accepted: requests whose tokens follow from the headers of "
        "images and videos",
        param=param,
        code="needs_pixels",
    )


UNREAD = UnreadPixels()


@dataclass(frozen=True, slots=True)
class Image:
    """An RGB image, decoded or about to be.

    identity: 64 hex digits, a 256-bit hash of the source bytes with their type and dimensions
        (`media.image.decode`). It names the image in every cache.
    width, height: pixels.
    pixels: the pixels, or the source that decodes them.
    """

    identity: str
    width: int
    height: int
    pixels: Rgb | PixelSource = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.pixels, Rgb) and len(self.pixels) != self.rgb_bytes:
            raise ValueError(f"rgb holds {len(self.pixels)} bytes, {self.width}x{self.height}x3 needed")

    @property
    def rgb(self) -> Rgb:
        """The pixels in memory; without a reference to them, they are decoded again at the next call.

        Raises InvalidImage if they cannot be decoded.
        """
        if isinstance(self.pixels, Rgb):
            return self.pixels
        rgb = self.pixels.read()
        if len(rgb) != self.rgb_bytes:
            raise InvalidImage(f"its decoder returned {len(rgb)} bytes, {self.rgb_bytes} are needed")
        return rgb

    @property
    def rgb_bytes(self) -> int:
        """The size of the decoded pixels in bytes."""
        return self.width * self.height * 3

    @property
    def held_bytes(self) -> int:
        """The bytes that this image holds in memory: its pixels, or the file that they are decoded from."""
        return self.rgb_bytes if isinstance(self.pixels, Rgb) else self.pixels.size

    @property
    def decode_s(self) -> float:
        """Seconds that decoding took the last time; 0 for an image whose pixels were given."""
        return 0.0 if isinstance(self.pixels, Rgb) else self.pixels.seconds


AUTO: Final = "auto"
"""As many visual tokens as the question needs."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """How many of an image's visual tokens the decoder gets, and the method that chooses them.

    method: name of a method or preset in `engine.visual_budget.methods`.
    keep: share of the image's visual tokens that are kept, more than 0 and at most 1; "auto": as many as the
        question needs, which the method `relevance` finds out.
    budget: number of visual tokens that are kept, from 1 on.
    explain: whether the answer reports the regions and their relevance; the method `relevance` supports it.
    from_operator: the number comes from the server's settings, not from the request. Too small a number is
        then raised to the fewest tokens that the model allows, and not refused.
    at_most: largest share that "auto" may keep.

    At most one of keep and budget may be set. With neither, `relevance` keeps as many as with "auto", and
    other methods keep half of the tokens. With the method `views`, all images of a request that have equal
    values share one keep or budget.

    Raises InvalidRequest for values outside these ranges.
    """

    method: str
    keep: float | Literal["auto"] | None = None
    budget: int | None = None
    explain: bool = False
    from_operator: bool = False
    at_most: float = 1.0

    def __post_init__(self) -> None:
        if self.keep is not None and self.budget is not None:
            raise InvalidRequest("keep and budget say the same; send one", param="visual_tokens")
        share = self.share
        if share is not None and not (_is(share, int | float) and 0 < share <= 1):
            raise InvalidRequest(
                f"keep is {self.keep!r}; accepted: more than 0, at most 1, or 'auto'", param="visual_tokens"
            )
        if self.budget is not None and not (_is(self.budget, int) and self.budget >= 1):
            raise InvalidRequest(
                f"budget is {self.budget!r}; accepted: a whole number from 1 on", param="visual_tokens"
            )

    @property
    def share(self) -> float | None:
        """The share that is kept; None: the wish names none."""
        return None if self.keep == AUTO else self.keep


def _is(value: object, kind: type | UnionType) -> bool:
    """Like isinstance, but a bool does not count as a number."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """The client's limits on an image's pixels and visual tokens.

    The model's processor turns them into a visual plan.

    detail: detail level. "low" is about 64 visual tokens and "medium" about 256 where the architecture allows
        it; "high" is the model's own limit. For "auto" the engine's policy chooses the level.
    min_pixels, max_pixels: bounds on the pixels after resizing; they override `detail`. None: the model's own
        bounds.
    visual: how many of the resulting visual tokens are kept. None: the engine's policy decides.
    """

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    visual: VisualTokens | None = None

    @property
    def explicit(self) -> bool:
        """Whether the client set bounds on pixels, which override `detail`."""
        return self.min_pixels is not None or self.max_pixels is not None


@dataclass(frozen=True, slots=True)
class RelevanceRecord:
    """Measurements of one image that was encoded region by region, for metrics.

    regions: (relevance in [0, 1], visual tokens) of each region.
    tensions: compress, exploit and focus, each in [0, 1].
    ways: means of the propositional, perspectival and participatory maps.
    seconds: duration of balancing and attending.
    """

    regions: tuple[tuple[float, int], ...]
    tensions: tuple[float, float, float]
    ways: tuple[float, float, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class ImageUse:
    """How one image of a request was used: its detail level, its visual tokens, and the reasons.

    detail: the detail level; "pixels" if the request set bounds on pixels.
    tokens: number of visual tokens in the prompt.
    reason: why the image got this level.
    method, full: the method that reduced the visual tokens, and their number before it; None without a
        reduction.
    record: measurements of an image encoded region by region, if they are still cached.
    relevance: a JSON explanation of the same image, if the request set `explain`.
    """

    detail: Level | Literal["pixels"]
    tokens: int
    reason: str
    method: str | None = None
    full: int | None = None
    record: RelevanceRecord | None = field(default=None, compare=False)
    relevance: Mapping[str, Any] | None = field(default=None, compare=False)


def content_identity(media_type: str, width: int, height: int, data: bytes) -> str:
    """Return the SHA-256 of (media_type, width, height, data) as 64 hex digits.

    Each part is preceded by its length, so that two different tuples never give the same bytes to the hash.
    """
    digest = hashlib.sha256()
    for part in (media_type.encode(), str(width).encode(), str(height).encode(), data):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _never() -> bool:
    return False


class Abandoned(Exception):
    """The frames of a video or the pages of a PDF are not wanted any more; decoding has stopped."""


class FrameSource(Protocol):
    """Reads the frames of a video. Thread-safe: calls of `read` are independent of each other."""

    def check(self, indices: Sequence[int]) -> None:
        """Check, before anything is decoded, that reading these frames is not too much work.

        Raises InvalidVideo with the amount of work and the limit.
        """
        ...

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = _never) -> Iterator[Rgb]:
        """Yield the RGB bytes (height * width * 3, row-major) of each frame in `indices`.

        indices: ascending; a repeated index yields its frame again.
        abandoned: asked again and again while frames are decoded; True stops it.
        Raises InvalidVideo if a frame cannot be decoded, Abandoned if nobody wants the frames any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Video:
    """An undecoded video: header and a source of frames.

    identity: 64 hex digits, a 256-bit hash of the source bytes with type and dimensions, or of the frames.
    width, height: pixels of an upright frame.
    frames: number of frames.
    fps: frames per second, on average.
    source: reads the frames.
    preselected: whether the client selected the frames. The model then gets all of them, up to its own limit,
        unless the budget sets a number or rate of frames.
    """

    identity: str
    width: int
    height: int
    frames: int
    fps: float
    source: FrameSource = field(repr=False, compare=False)
    preselected: bool = False


@dataclass(frozen=True, slots=True)
class VideoBudget:
    """The client's limits on the frames and visual tokens of a video.

    Where a field is None, the model's own video processor decides.

    fps: frames sampled per second of video.
    min_frames, max_frames: bounds on the number of sampled frames.
    max_pixels: most pixels of one frame after resizing.
    pruning_rate: share of the visual tokens that are left out where little moves, 0 to 0.95; 0 keeps all.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    pruning_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class _DecodedFrames:
    """A source of frames that are decoded already."""

    images: tuple[Image, ...]

    def check(self, indices: Sequence[int]) -> None:
        """Nothing: the frames are there."""

    def read(self, indices: Sequence[int], abandoned: Callable[[], bool] = _never) -> Iterator[Rgb]:
        return (self.images[index].rgb for index in indices)


def video_of_images(images: Sequence[Image], fps: float = FRAMES_PER_SECOND) -> Video:
    """Make a video of pictures, in order. Raises ValueError for none, or for pictures of different sizes."""
    if not images:
        raise ValueError("the video has no frames; at least one is needed")
    first = images[0]
    for image in images:
        if (image.width, image.height) != (first.width, first.height):
            raise ValueError(
                f"frames of {first.width}x{first.height} and {image.width}x{image.height} pixels"
            )
    digest = hashlib.sha256(f"frames;{fps!r};".encode())
    for image in images:
        digest.update(f"{image.identity};".encode())
    return Video(
        digest.hexdigest(), first.width, first.height, len(images), fps, _DecodedFrames(tuple(images)), True
    )


class Payload:
    """A data: URL of a request, as the UTF-8 bytes that arrived.

    A string of it would take as many bytes again, and the copying would stop all other clients meanwhile.

    data: the whole URL. Empty once it is dropped.
    on_drop: called once with the number of bytes that were given back.
    """

    __slots__ = ("data", "on_drop")

    def __init__(self, data: bytes | bytearray, on_drop: Callable[[int], None] | None = None) -> None:
        self.data = data
        self.on_drop = on_drop

    def __len__(self) -> int:
        return len(self.data)

    def __deepcopy__(self, memo: dict[int, object]) -> Payload:
        """Return a copy of its own, which nobody else's memory counts."""
        return Payload(bytes(self.data))

    def __repr__(self) -> str:
        return f"<data: URL of {len(self.data)} bytes>"

    def startswith(self, prefix: str) -> bool:
        """Tell whether the URL begins with a text, like str.startswith."""
        return self.data.startswith(prefix.encode())

    def drop(self) -> None:
        """Give the memory back. To be called in the event loop's thread, once the image or video was read."""
        size, self.data = len(self.data), b""
        if size and self.on_drop is not None:
            self.on_drop(size)
