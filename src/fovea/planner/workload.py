"""The workload of a plan: kinds of requests, how often they come, and how fast they must be answered.

The tokens of requests follow from it: of their prompts, images and answers, how many of them have to be
computed, and what leaving out visual tokens costs in accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fovea.core.config_files import Table, check_keys, nearest, read_toml, settings_table, tables
from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting

MEASURED = {
    "resize": {0.5: 18.6, 0.25: 31.2, 0.1: 58.8},
    "uniform": {0.5: 18.2, 0.25: 24.5, 0.1: 36.5},
    "random": {0.5: 17.5, 0.25: 29.7, 0.1: 42.4},
    "dart": {0.5: 12.2, 0.25: 18.9, 0.1: 26.7},
    "dart_query": {0.5: 6.5},
    "dpp": {0.5: 2.5, 0.25: 9.7, 0.1: 31.1},
    "dpp_query": {0.5: 12.0},
    "visionzip": {0.5: 2.2},
    "tome": {0.5: 4.0},
    "fastv": {0.5: 4.2},
    "relevance": {0.5: 1.1, 0.25: 3.4, 0.1: 11.0},
}
"""Percentage points of right answers lost, by method and share of the tokens that are kept."""
BEFORE_ENCODER = ("relevance", "resize")
"""Methods that also save work of the encoder; the others leave out tokens of its output."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The measured loss of accuracy.

    points: percentage points of right answers below all tokens.
    keep: the share at which it was measured: the largest measured one that is not above the asked one.
    """

    points: float
    keep: float


def check_method(method: str) -> str:
    """Return "" if a method was measured. Otherwise raises ConfigError, which names the nearest one."""
    if method not in MEASURED:
        raise ConfigError(f"method is {method!r}; {nearest(method, MEASURED)}", param="method")
    return ""


def loss(method: str, keep: float) -> Loss | None:
    """Return the loss of a method that keeps a share of the tokens; None: it was not measured so far down.

    Raises ConfigError for an unknown method.
    """
    check_method(method)
    if keep >= 1:
        return Loss(0.0, 1.0)
    measured = [share for share in MEASURED[method] if share <= keep]
    if not measured:
        return None
    nearest = max(measured)
    return Loss(MEASURED[method][nearest], nearest)


MOST_PIXELS = 65_536
"""Longest side of an image that is planned, in pixels."""
MOST_FRAMES = 100_000


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a request: frames that the model sees, and their size in pixels."""

    frames: int
    width: int
    height: int

    def __post_init__(self) -> None:
        if not 1 <= self.frames <= MOST_FRAMES:
            raise ConfigError(
                f"frames of a video are {self.frames!r}; accepted: 1 to {MOST_FRAMES}", param="video"
            )
        _check_size("video", (self.width, self.height))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    name: for tables.
    images: (width, height) of each image, in pixels.
    video: its video; None: it has none.

    Raises ConfigError for a value that is not accepted.
    """

    name: str
    share: float = setting(
        1.0, "Its share of the conversations; the shares need not add up to 1.", low=0, high=1e6
    )
    images: tuple[tuple[int, int], ...] = ()
    video: Video | None = None
    text: int = setting(60, "Tokens of the question, without the system prompt.", low=1, high=1 << 20)
    answer: int = setting(120, "Tokens of the answer.", low=1, high=1 << 20)
    follow_ups: float = setting(
        0.0, "Further questions about the same images, in the mean, each with the text so far.",
        low=0, high=1000,
    )  # fmt: skip
    seen: float = setting(
        0.0, "Share of the images whose encoder output is cached, because another request had them before.",
        low=0, high=1,
    )  # fmt: skip
    json: float = setting(0.0, "Share of the answers that follow a JSON schema.", low=0, high=1)
    forced: float = setting(
        0.45, "Share of such an answer's tokens that the schema leaves no choice about.", low=0, high=0.99
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for size in self.images:
            _check_size("images", size)


@dataclass(frozen=True, slots=True)
class Workload:
    """A mix of requests and the targets for their answers.

    kinds: the kinds of requests.

    Raises ConfigError for a value that is not accepted, an unknown method, or without a request.
    """

    kinds: tuple[Kind, ...]
    rate: float = setting(
        1.0, "Conversations that begin per second; each has 1 + follow_ups requests.", low=1e-6, high=1e6
    )
    system: int = setting(0, "Tokens of a system prompt that all requests share.", low=0, high=1 << 20)
    ttft_ms: float = setting(0.0, "Target of the time to the first token; 0: none.", low=0, high=1e7)
    itl_ms: float = setting(0.0, "Target of the time between tokens; 0: none.", low=0, high=1e6)
    percentile: float = setting(
        95.0, "Share of requests, in percent, that must meet the targets.", low=50, high=99.9
    )
    keep: float = setting(1.0, "Share of the visual tokens that are kept; 1: all.", low=0.01, high=1)
    method: str = setting("relevance", "Method that leaves out the others.", check=check_method)

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.kinds:
            raise ConfigError(
                "the workload has no requests; accepted: one [[request]] or more", param="request"
            )
        if not sum(kind.share for kind in self.kinds) > 0:
            raise ConfigError("the shares of all requests are 0; one has to be more", param="share")

    @property
    def shares(self) -> tuple[float, ...]:
        """The kinds' shares of the conversations, which add up to 1."""
        total = sum(kind.share for kind in self.kinds)
        return tuple(kind.share / total for kind in self.kinds)

    @property
    def requests_per_s(self) -> float:
        """Requests per second, follow-ups included."""
        return self.rate * sum(
            share * (1 + kind.follow_ups) for share, kind in zip(self.shares, self.kinds, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of an image in a model.

    prompt: its visual tokens in the prompt.
    rows: rows of the encoder's output. They are more than `prompt` only where image states lie outside of
        the prompt (Llama 3.2 Vision).
    """

    prompt: int
    rows: int


TokenCount = Callable[[int, int], ImageTokens]
"""Tokens of an image of so many pixels (width, height)."""


def read_workload(path: Path) -> Workload:
    """Return the workload of a TOML file.

    rate = 4.0                      # conversations per second
    system = 150                    # tokens that all prompts begin with
    ttft_ms = 1500                  # targets; 0: none
    itl_ms = 60
    percentile = 95

    [[request]]
    name = "invoice to JSON"
    share = 0.6
    images = [[1240, 1754]]         # width and height of each image
    text = 80                       # tokens
    answer = 250
    json = 1.0                      # share of the answers with a schema
    seen = 0.1                      # share of images that other requests had before
    follow_ups = 0.5

    Raises ConfigError, which names the file, the request, the field and the accepted values.
    """
    where = f"workload file {path}"
    content = read_toml(path, "workload file")
    kinds = tuple(
        _kind(where, number, values) for number, values in enumerate(tables(where, content, "request"), 1)
    )
    return settings_table(Workload, where, content, also=("request",), kinds=kinds)


def _kind(file: str, number: int, values: dict[str, Any]) -> Kind:
    where = f"{file}, [[request]] number {number}"
    video = values.get("video")
    return settings_table(
        Kind,
        where,
        values,
        name=Table(where, values).text("name", f"request {number}"),
        images=tuple(_size(where, "images", size) for size in _list(where, values.get("images", []))),
        video=None if video is None else _video(where, video),
    )


def _check_size(name: str, size: tuple[int, int]) -> None:
    if not all(1 <= side <= MOST_PIXELS for side in size):
        raise ConfigError(
            f"{name}: a size is {size[0]}x{size[1]}; accepted: sides of 1 to {MOST_PIXELS} pixels", param=name
        )


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(
            f"{where}: images is {value!r}; accepted: [[width, height], ...], such as [[640, 360]]",
            param="images",
        )
    return value


def _size(where: str, key: str, value: Any) -> tuple[int, int]:
    sides = value if isinstance(value, list) else []
    good = [side for side in sides if isinstance(side, int) and not isinstance(side, bool)]
    if len(sides) != 2 or len(good) != 2 or not all(1 <= side <= MOST_PIXELS for side in good):
        raise ConfigError(
            f"{where}: {key} has {value!r}; accepted: [width, height] in pixels, 1 to {MOST_PIXELS}",
            param=key,
        )
    return good[0], good[1]


def _video(where: str, value: Any) -> Video:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: video is {value!r}; accepted: {{ frames = 16, size = [640, 360] }}", param="video"
        )
    inner = f"{where}, video"
    check_keys(inner, value, ("frames", "size"))
    frames = Table(inner, value).whole("frames", 1, MOST_FRAMES)
    return Video(frames, *_size(inner, "size", value.get("size")))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one request of a kind, in the mean over a conversation.

    images: rows of the encoder's output for each image, without reduction.
    encoder_rows: rows that the encoder computes for each image. They are fewer than `images` with a method
        of `reduction.BEFORE_ENCODER`.
    visual: visual tokens in the prompt, after reduction.
    encoded: share of these images that the encoder has to compute, by request.
    prompt: tokens of the whole prompt.
    computed: how many of these have no cached KV.
    answer: tokens of the answer.
    chosen: how many of these are sampled one by one; the others are forced by the answer's form.
    last: tokens at the end of the conversation, the last answer included.
    """

    images: tuple[int, ...]
    encoder_rows: tuple[int, ...]
    visual: int
    encoded: float
    prompt: float
    computed: float
    answer: float
    chosen: float
    last: float

    @property
    def context(self) -> float:
        """Tokens that a decode attends to, in the mean over the answer."""
        return self.prompt + self.answer / 2

    @property
    def longest(self) -> float:
        """Tokens of KV at the end of the answer."""
        return self.prompt + self.answer


PAIRED_FRAMES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v",
)  # fmt: skip
"""Families whose towers see two frames of a video as one patch in time."""


def frame_group(family: str) -> int:
    """Return how many frames of a video become one set of visual tokens in models of a family."""
    return 2 if family in PAIRED_FRAMES else 1


def tokens_of(kind: Kind, workload: Workload, count: TokenCount, frame_group: int = 2) -> Tokens:
    """Return the tokens of a kind's requests.

    Follow-ups find the prompt and the answer before them in the prefix cache, so they compute their text
    alone. The first request of a conversation finds the system prompt there.

    count: visual tokens of an image in this model.
    frame_group: frames of a video that become one set of visual tokens (`frame_group`).
    """
    images = [count(width, height) for width, height in kind.images]
    if kind.video is not None:
        groups = math.ceil(kind.video.frames / frame_group)
        images += [count(kind.video.width, kind.video.height)] * groups
    visual = sum(math.ceil(image.prompt * workload.keep) for image in images)
    before = workload.keep if workload.method in BEFORE_ENCODER else 1.0
    turns = 1 + kind.follow_ups
    first = workload.system + visual + kind.text
    # The prompt of the n-th follow-up has n questions and answers more than the first one's.
    longer = kind.follow_ups / 2 * (kind.text + kind.answer)
    return Tokens(
        images=tuple(image.rows for image in images),
        encoder_rows=tuple(math.ceil(image.rows * before) for image in images),
        visual=visual,
        encoded=(1 - kind.seen) / turns if images else 0.0,
        prompt=first + longer,
        computed=visual / turns + kind.text,
        answer=kind.answer,
        chosen=kind.answer * (1 - kind.json * kind.forced),
        last=first + kind.answer + kind.follow_ups * (kind.text + kind.answer),
    )


def variants(kind: Kind, workload: Workload, tokens: Tokens) -> list[tuple[float, Tokens]]:
    """Return the different requests of a kind with their shares, which add up to 1.

    A conversation's first request has images that are new, or known from other requests. Its follow-ups have
    neither images nor text before their own to compute. The mean of the variants is `tokens`.

    tokens: result of `tokens_of` for this kind.
    """
    turns = 1 + kind.follow_ups
    prompt = workload.system + tokens.visual + kind.text
    first = replace(tokens, encoded=1.0, prompt=prompt, computed=tokens.visual + kind.text)
    parts = [
        ((1 - kind.seen) / turns if tokens.images else 0.0, first),
        (kind.seen / turns if tokens.images else 1 / turns, replace(first, encoded=0.0)),
    ]
    if kind.follow_ups:
        longer = (kind.follow_ups + 1) / 2 * (kind.text + kind.answer)
        later = replace(tokens, encoded=0.0, prompt=prompt + longer, computed=float(kind.text))
        parts.append((kind.follow_ups / turns, later))
    return [part for part in parts if part[0]]
