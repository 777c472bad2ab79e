"""The workload of a plan: kinds of requests, how often they come, and how fast they must be answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fovea.core.errors import ConfigError
from fovea.planner.toml_values import Table, check_keys, read_toml, tables

MOST_PIXELS = 65_536
"""Longest side of an image that is planned, in pixels."""
_OUTER = ("rate", "system", "ttft_ms", "itl_ms", "percentile", "keep", "method", "request")
_INNER = (
    "name", "share", "images", "video", "text", "answer", "follow_ups", "seen", "json", "forced",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Video:
    """A video of a request: frames that the model sees, and their size in pixels."""

    frames: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    name: for tables.
    share: its share of the conversations; the shares need not add up to 1.
    images: (width, height) of each image, in pixels.
    video: its video; None: it has none.
    text: tokens of the question, without the system prompt.
    answer: tokens of the answer.
    follow_ups: further questions about the same images, in the mean, each with the text so far.
    seen: share of the images whose encoder output is cached, because another request had them before.
    json: share of the answers that follow a JSON schema.
    forced: share of such an answer's tokens that the schema leaves no choice about.
    """

    name: str
    share: float = 1.0
    images: tuple[tuple[int, int], ...] = ()
    video: Video | None = None
    text: int = 60
    answer: int = 120
    follow_ups: float = 0.0
    seen: float = 0.0
    json: float = 0.0
    forced: float = 0.45


@dataclass(frozen=True, slots=True)
class Workload:
    """A mix of requests and the targets for their answers.

    kinds: the kinds of requests.
    rate: conversations that begin per second; each has 1 + follow_ups requests.
    system: tokens of a system prompt that all requests share.
    ttft_ms, itl_ms: targets of the time to the first token and between tokens; 0: none.
    percentile: share of requests, in percent, that must meet them.
    keep: share of the visual tokens that are kept; 1: all.
    method: method that leaves out the others, for the loss of accuracy.
    """

    kinds: tuple[Kind, ...]
    rate: float = 1.0
    system: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    percentile: float = 95.0
    keep: float = 1.0
    method: str = "relevance"

    def __post_init__(self) -> None:
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
    """What an image is in a model.

    prompt: its visual tokens in the prompt.
    rows: rows of the encoder's output. They are more than `prompt` only where image states lie outside of
        the prompt (Llama 3.2 Vision).
    """

    prompt: int
    rows: int


TokenCount = Callable[[int, int], ImageTokens]
"""Tokens of an image of so many pixels (width, height)."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one request of a kind, in the mean over a conversation.

    images: rows of the encoder's output for each image, without reduction.
    visual: visual tokens in the prompt, after reduction.
    encoded: share of these images that the encoder has to compute, by request.
    prompt: tokens of the whole prompt.
    computed: how many of these have no cached KV.
    answer: tokens of the answer.
    chosen: how many of these are sampled one by one; the others are forced by the answer's form.
    """

    images: tuple[int, ...]
    visual: int
    encoded: float
    prompt: float
    computed: float
    answer: float
    chosen: float

    @property
    def context(self) -> float:
        """Tokens that a decode attends to, in the mean over the answer."""
        return self.prompt + self.answer / 2

    @property
    def longest(self) -> float:
        """Tokens of KV at the end of the answer."""
        return self.prompt + self.answer


def tokens_of(kind: Kind, workload: Workload, count: TokenCount, frame_group: int = 2) -> Tokens:
    """Return the tokens of a kind's requests.

    Follow-ups find the prompt and the answer before them in the prefix cache, so they compute their text
    alone. The first request of a conversation finds the system prompt there.

    count: visual tokens of an image in this model.
    frame_group: frames of a video that become one set of visual tokens.
    """
    images = [count(width, height) for width, height in kind.images]
    if kind.video is not None:
        groups = math.ceil(kind.video.frames / frame_group)
        images += [count(kind.video.width, kind.video.height)] * groups
    visual = sum(math.ceil(image.prompt * workload.keep) for image in images)
    turns = 1 + kind.follow_ups
    first = workload.system + visual + kind.text
    # The prompt of the n-th follow-up has n questions and answers more than the first one's.
    longer = kind.follow_ups / 2 * (kind.text + kind.answer)
    return Tokens(
        images=tuple(image.rows for image in images),
        visual=visual,
        encoded=(1 - kind.seen) / turns if images else 0.0,
        prompt=first + longer,
        computed=visual / turns + kind.text,
        answer=kind.answer,
        chosen=kind.answer * (1 - kind.json * kind.forced),
    )


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
    content = read_toml(path, "workload file")
    where = f"workload file {path}"
    check_keys(where, content, _OUTER)
    outer = Table(where, content)
    return Workload(
        kinds=tuple(
            _kind(where, number, values) for number, values in enumerate(tables(where, content, "request"), 1)
        ),
        rate=outer.number("rate", 1e-6, 1e6, 1.0),
        system=outer.whole("system", 0, 1 << 20, 0),
        ttft_ms=outer.number("ttft_ms", 0, 1e7, 0.0),
        itl_ms=outer.number("itl_ms", 0, 1e6, 0.0),
        percentile=outer.number("percentile", 50, 99.9, 95.0),
        keep=outer.number("keep", 0.01, 1.0, 1.0),
        method=outer.text("method", "relevance"),
    )


def _kind(file: str, number: int, values: dict[str, Any]) -> Kind:
    where = f"{file}, [[request]] number {number}"
    check_keys(where, values, _INNER)
    table = Table(where, values)
    video = values.get("video")
    return Kind(
        name=table.text("name", f"request {number}"),
        share=table.number("share", 0, 1e6, 1.0),
        images=tuple(_size(where, "images", size) for size in _list(where, values.get("images", []))),
        video=None if video is None else _video(where, video),
        text=table.whole("text", 1, 1 << 20, 60),
        answer=table.whole("answer", 1, 1 << 20, 120),
        follow_ups=table.number("follow_ups", 0, 1000, 0.0),
        seen=table.number("seen", 0, 1, 0.0),
        json=table.number("json", 0, 1, 0.0),
        forced=table.number("forced", 0, 0.99, 0.45),
    )


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: images is {value!r}; accepted: [[width, height], ...]", param="images")
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
    frames = Table(inner, value).whole("frames", 1, 100_000)
    return Video(frames, *_size(inner, "size", value.get("size")))
