"""Settings of a benchmark: the server, the requests, and how often they are sent."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, required, setting
from fovea.core.trace import ARRIVALS, Workload

FIXED = ("cold", "images", "questions", "followup", "known", "text", "stall")
LOADS = ("open", "closed", "chat", "trace")
"""Workloads with random or recorded arrivals. FIXED are those that always send the same requests."""
IMAGES_AS = ("data", "sent", "encoded")


def _header_text(text: str) -> str:
    return "" if text.isascii() and text.isprintable() else "characters that an HTTP header can carry"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured."""

    url: str = required("Base URL of the server.")
    api_key: str | None = setting(None, "Key for the Authorization header.", check=_header_text)
    model: str | None = setting(None, "Name of the model; none: the first one that the server lists.")
    timeout: float = setting(
        600.0,
        "Seconds after which a request is given up, counted from the time when it was due.",
        low=0.001,
        high=1000000.0,
    )
    images_as: str = setting(
        "data",
        "How images are sent: data (as data URLs in every request), sent (ahead, to /v1/images, and named by "
        "fovea-image://ID), encoded (sent ahead and encoded ahead).",
        choices=IMAGES_AS,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _base_url(self.url))
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of prompts, images and answers, and how often they are measured."""

    visual_tokens: tuple[int, ...] = setting(
        (256,), "Sizes of images in visual tokens, taken in turn.", low=1, high=10**6, nonempty=True
    )
    token_side: int = setting(
        28,
        "Side of a visual token in pixels: 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL.",
        low=1,
        high=256,
    )
    prompt_tokens: int = setting(
        56, "Text tokens of a prompt, approximately; under random load their mean.", low=1, high=10**6
    )
    output_tokens: int = setting(64, "Tokens of an answer; under random load their mean.", low=2, high=10**6)
    concurrency: int = setting(8, "Simultaneous requests of the fixed workloads.", low=1, high=4096)
    repeats: int = setting(3, "Measured rounds of each fixed workload.", low=1, high=1000)
    warmup: int = setting(1, "Rounds before these that are not measured.", low=0, high=100)
    seed: int = setting(0, "The same seed sends the same requests at the same times.", low=0, high=2**31)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of the workloads open, closed and chat."""

    rate: tuple[float, ...] = setting(
        (1.0,),
        "Requests per second of the workload open. Several rates are measured one after the other.",
        low=1e-06,
        high=1000000.0,
        nonempty=True,
    )
    arrivals: str = setting(
        "poisson",
        "Arrival times of open: poisson (independent), ramp (from 0.2 to 1.8 times the rate), "
        "burst (16 at a time).",
        choices=tuple(ARRIVALS),
    )
    clients: int = setting(
        8, "Clients of closed and chat; each sends its next request when it has its answer.", low=1, high=4096
    )
    requests: int = setting(
        100,
        "Number of requests per rate; for chat it is rounded up to whole conversations.",
        low=1,
        high=10**6,
    )
    turns: int = setting(
        4, "Questions of a conversation in chat; the first one comes with an image.", low=1, high=1000
    )
    think: float = setting(0.0, "Seconds between an answer and the next question in chat.", low=0, high=10**4)
    text: float = setting(0.5, "Share of requests without an image, for open and closed.", low=0, high=1)
    images: int = setting(300, "Number of distinct images.", low=1, high=10**6)
    zipf: float = setting(
        1.1,
        "Exponent of the images' popularity: the n-th most popular is used n**-zipf times as often as the "
        "first. 0: all equally often.",
        low=0,
        high=10,
    )
    images_per_request: int = setting(1, "Images of a request that has any.", low=1, high=64)
    system_tokens: int = setting(0, "Tokens of a system prompt that all requests share.", low=0, high=10**6)

    def __post_init__(self) -> None:
        check_settings(self)

    def load(self, shape: Shape, rate: float) -> Workload:
        """Return the workload for `fovea simulate`; a seed gives the same requests there.

        rate: requests per second.
        """
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
    """Cost of the machine that serves."""

    price_per_hour: float | None = setting(
        None, "Price of the server's machine per hour, for cost_per_request.", low=0, high=10**6
    )

    def __post_init__(self) -> None:
        check_settings(self)


def _base_url(text: str) -> str:
    """Return the URL with a path; /v1, as in OpenAI's clients, if it has none.

    Raises ConfigError for a wrong URL. Credentials in a URL are refused, because results would contain them;
    there is --api-key for them.
    """
    try:
        url = urlsplit(text)
        host = (url.hostname or "").encode("idna")  # raises UnicodeError, a ValueError, as connecting would
        good = url.scheme in ("http", "https") and bool(host) and url.port != 0 and "@" not in url.netloc
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"URL is {text!r}; accepted: http:// or https:// and a host, no credentials, as in http://127.0.0.1:8000",
            param="url",
        )
    return urlunsplit((url.scheme, url.netloc, url.path.rstrip("/") or "/v1", "", ""))
