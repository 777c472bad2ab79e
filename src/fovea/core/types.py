"""The values that cross the border between whoever serves and whoever computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fovea.core.image import Image, ImageUse, PixelBudget
from fovea.core.sampling import SamplingParams
from fovea.core.video import Video, VideoBudget

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    image: Image
    budget: PixelBudget = PixelBudget()


@dataclass(frozen=True, slots=True)
class VideoPart:
    video: Video
    budget: VideoBudget = VideoBudget()


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Images and videos may stand in any turn, anywhere among the text."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages that the model's own chat template turns into text."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is; each of the model's image markers in it takes the next image."""

    text: str
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """id: unique among the requests in flight.

    cache_salt: requests with different salts share no cache entry.
    timeout: seconds from arrival; None: no deadline of its own.
    encode_only: the images of the prompt are encoded and nothing is generated; the answer is empty.
    priority: smaller is served first, where the engine's policy looks at it.
    usual_tokens: longest answer where sampling.max_tokens is None, if the context has room for it; None: all of it.
    fetch_s, media_decode_s: seconds that its images and videos took before the engine saw the request: until their
    bytes and headers were there, and from there to pixels (of a video: to a file that is open).
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    cache_salt: str = ""
    timeout: float | None = None
    encode_only: bool = False
    priority: int = 0
    usual_tokens: int | None = None
    fetch_s: float = 0.0
    media_decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """logprob of the model before temperature and penalties; `top` holds (id, text, logprob), most likely first.

    text: the token's own bytes; those that are no whole character are surrogates (PEP 383, "surrogateescape").
    """

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached` are prompt tokens whose KV was found; `image` are prompt tokens that stand for images or videos."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    image: int = 0


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Seconds per stage of one request. `ttft` runs from arrival at the engine to the first token.

    fetch, media_decode: before the engine, as in GenerationRequest. decode: of tokens, from the first to the last.
    """

    fetch: float = 0.0
    media_decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    ttft: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one, for one choice.

    `finish_reason` is set on the last delta of a choice; `usage`, `timings` and `images` (how closely each was looked at)
    on the last of the request.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: StageTimings | None = None
    images: tuple[ImageUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer: every choice's text, ids and reason, with what it cost and how closely its images were looked at."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage
    timings: StageTimings
    images: tuple[ImageUse, ...] = ()

    @property
    def text(self) -> str:
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server tells about the model it runs. `max_context` in tokens, prompt and answer together; `quantization` as
    EngineConfig names it."""

    name: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    max_context: int
    vocab_size: int
    created: int
    default_sampling: dict[str, float | int] = field(default_factory=dict)
    quantization: str = "none"
