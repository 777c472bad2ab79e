"""Who is asked, what, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fovea.core.errors import ConfigError
from fovea.core.workload import ARRIVALS, Workload

FIXED = ("cold", "images", "questions", "followup", "known", "text", "stall")
LOADS = ("open", "closed", "chat", "trace")
"""The workloads."""
IMAGES_AS = ("data", "sent", "encoded")


@dataclass(frozen=True, slots=True)
class Target:
    """model: the name to ask for (default: the first that is served).
    timeout: seconds after which a request is given up, counted from when it was due. (0, 10**6].
    images_as: "data" (data URLs in every request), "sent" (sent ahead to /v1/images, named by fovea-image://ID),
        "encoded" (sent ahead and encoded there, too).
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    timeout: float = 600.0
    images_as: str = "data"

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _base_url(self.url))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key holds characters that no header can carry", param="api_key")
        if not 0 < self.timeout <= 1e6:
            raise ConfigError(f"timeout is {self.timeout!r}; accepted: above 0, up to 1e+06", param="timeout")
        if self.images_as not in IMAGES_AS:
            raise ConfigError(
                f"images_as is {self.images_as!r}; accepted: {', '.join(IMAGES_AS)}", param="images_as"
            )


@dataclass(frozen=True, slots=True)
class Shape:
    """visual_tokens: sizes of images, taken in turn.
    token_side: pixels of the side of a visual token; 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL. [1, 256].
    prompt_tokens: text of a prompt, about; under a load in the mean. [1, 10**6].
    output_tokens: of an answer; under a load in the mean. [2, 10**6].
    concurrency: requests at once, of the fixed workloads. [1, 4096].
    repeats: measured rounds of each fixed workload. [1, 1000].
    warmup: rounds before them that are not measured. [0, 100].
    seed: what is asked, and when, under a load. [0, 2**31].
    """

    visual_tokens: tuple[int, ...] = (256,)
    token_side: int = 28
    prompt_tokens: int = 56
    output_tokens: int = 64
    concurrency: int = 8
    repeats: int = 3
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self, token_side=(1, 256), prompt_tokens=(1, 10**6), output_tokens=(2, 10**6), concurrency=(1, 4096),
               repeats=(1, 1000), warmup=(0, 100), seed=(0, 2**31))  # fmt: skip
        if not self.visual_tokens or not all(1 <= size <= 10**6 for size in self.visual_tokens):
            raise ConfigError(
                f"visual_tokens is {self.visual_tokens!r}; accepted: sizes from 1 to 1e+06",
                param="visual_tokens",
            )


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests per second of the workload open; several are measured one after the other.
    arrivals: of open: "poisson" (independent), "ramp" (from 0.2 to 1.8 times the rate), "burst" (16 at a time).
    clients: of closed and chat: how many ask at a time, each again when it has its answer. [1, 4096].
    requests: how many, per rate; of chat, rounded up to whole conversations. [1, 10**6].
    turns: of chat: questions of a conversation; the first shows an image. [1, 1000].
    think: of chat: seconds between an answer and the next question. [0, 10**4].
    text: of open and closed: share of requests without an image. [0, 1].
    images: distinct images. [1, 10**6].
    zipf: how uneven their popularity is; 0: all alike; the n-th most popular is asked for n**-zipf times as often. [0, 10].
    images_per_request: of a request that has any. [1, 64].
    system_tokens: of a system prompt that all share. [0, 10**6].
    """

    rate: tuple[float, ...] = (1.0,)
    arrivals: str = "poisson"
    clients: int = 8
    requests: int = 100
    turns: int = 4
    think: float = 0.0
    text: float = 0.5
    images: int = 300
    zipf: float = 1.1
    images_per_request: int = 1
    system_tokens: int = 0

    def __post_init__(self) -> None:
        _check(self, clients=(1, 4096), requests=(1, 10**6), turns=(1, 1000), think=(0, 10**4), text=(0, 1),
               images=(1, 10**6), zipf=(0, 10), images_per_request=(1, 64), system_tokens=(0, 10**6))  # fmt: skip
        if not self.rate or not all(1e-6 <= rate <= 1e6 for rate in self.rate):
            raise ConfigError(f"rate is {self.rate!r}; accepted: 1e-06 to 1e+06, as A,B", param="rate")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(
                f"arrivals is {self.arrivals!r}; accepted: {', '.join(ARRIVALS)}", param="arrivals"
            )

    def load(self, shape: Shape, rate: float) -> Workload:
        """The load as `fovea simulate` knows it: the same seed asks the same there."""
        return Workload(
            requests=self.requests,
            rate=rate,
            arrivals=self.arrivals,
            text=self.text,
            images=self.images,
            zipf=self.zipf,
            images_per_request=self.images_per_request,
            visual_tokens=shape.visual_tokens,
            prompt_tokens=shape.prompt_tokens,
            output_tokens=shape.output_tokens,
            system_tokens=self.system_tokens,
            seed=shape.seed,
        )


@dataclass(frozen=True, slots=True)
class Price:
    """price_per_hour: of the machine that serves, for cost_per_request, in its currency. [0, 10**6]."""

    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.price_per_hour is not None:
            _check(self, price_per_hour=(0, 10**6))


def _base_url(text: str) -> str:
    """With the path that OpenAI's clients have in it, too. Credentials would end up in results: there is --api-key."""
    try:
        url = urlsplit(text)
        good = (
            url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and "@" not in url.netloc
        )
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"URL is {text!r}; accepted: http:// or https:// and a host, no credentials, as in http://127.0.0.1:8000",
            param="url",
        )
    return urlunsplit((url.scheme, url.netloc, url.path.rstrip("/") or "/v1", "", ""))


def _check(settings: Any, **ranges: tuple[float, float]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; accepted: {low:g} to {high:g}", param=name)
