"""OpenAI's wire models, with the extensions that this server documents. A field that is not here is refused.

What OpenAI's clients may send and this server can not do is declared too, so that it is refused by name instead of
being dropped; what has no effect on an answer (user, metadata and the like) is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_TEXT = 4_000_000
MAX_WORD = 4096
MAX_COUNT = 2**31
MAX_ITEMS = 4096
MAX_VALUES = 50_000
MAX_PROMPTS = 1024


def _real_number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_real_number)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
# A length is also what makes pydantic refuse half of a surrogate pair, which no tokenizer can encode.
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=MAX_WORD)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Body(Wire):
    """A request's body. Pydantic complains about every value that is wrong: a million of them would hold up every
    other client for seconds, so how many there may be is decided first.
    """

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_values(cls, value: Any) -> Any:
        if not _at_most(MAX_VALUES, value):
            raise ValueError(f"too many values; accepted: at most {MAX_VALUES} beside token ids")
        return value


def _at_most(limit: int, value: Any) -> bool:
    """Whether all lists and objects in `value` hold no more than `limit` entries, integers in lists aside."""
    count, inner = 0, [value]
    while inner and count <= limit:
        node = inner.pop()
        entries: list[Any] = []
        if isinstance(node, dict):
            entries = list(node.values())
        elif isinstance(node, list):
            entries = [entry for entry in node if type(entry) is not int]
        count += len(entries)
        inner += entries
    return count <= limit


class ImageURL(Wire):
    """url: data:, https:, http: or file: as the server allows. max_pixels, min_pixels: this image's own budget."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "medium", "high"] = Field(default="auto", description="(+) medium")
    max_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)


class VideoURL(Wire):
    """url: data:, https:, http: or file: as the server allows. The others are (+) this video's own budget."""

    url: str = Field(min_length=1)
    fps: Number | None = Field(default=None, gt=0, le=240, description="(+) frames sampled per second")
    min_frames: Integer | None = Field(default=None, ge=1, le=4096, description="(+)")
    max_frames: Integer | None = Field(default=None, ge=1, le=4096, description="(+)")
    max_pixels: Integer | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="(+) of one frame, after resizing"
    )
    video_pruning_rate: Number | None = Field(
        default=None, ge=0, le=0.95, description="(+) share of visual tokens left out where little moves"
    )


class TextContent(Wire):
    type: Literal["text"]
    text: Text


class ImageContent(Wire):
    type: Literal["image_url"]
    image_url: ImageURL


class VideoContent(Wire):
    type: Literal["video_url"]
    video_url: VideoURL


Content = Annotated[TextContent | ImageContent | VideoContent, Field(discriminator="type")]


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Content], Field(max_length=MAX_ITEMS)] | None = None
    name: Word | None = Field(default=None, description="no effect")
    refusal: None = Field(
        default=None, description="answers hold it, so that they can be sent back as they came"
    )


class StreamOptions(Wire):
    include_usage: Flag = False


class ResponseFormat(Wire):
    type: Literal["text"]


class Sampling(Body):
    """What chat and text completions share. Extensions beyond OpenAI are marked with (+)."""

    model: Word | None = Field(default=None, description="the served model's name, or nothing")
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    n: Integer | None = Field(default=1, ge=1, le=16)
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    stop: Word | Annotated[list[Word], Field(max_length=64)] | None = None
    max_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Number] | None = Field(default=None, max_length=1024)
    seed: Integer | None = Field(default=None, ge=-(2**63), lt=2**63)
    user: Word | None = Field(default=None, description="no effect")
    top_k: Integer | None = Field(
        default=None, ge=0, le=MAX_COUNT, description="(+) the k most likely; 0 is all"
    )
    min_p: Number | None = Field(
        default=None, ge=0, le=1, description="(+) floor relative to the most likely"
    )
    repetition_penalty: Number | None = Field(default=None, gt=0, le=10, description="(+)")
    min_tokens: Integer | None = Field(default=None, ge=0, le=MAX_COUNT, description="(+) no end before")
    stop_token_ids: list[Integer] | None = Field(default=None, max_length=64, description="(+)")
    ignore_eos: Flag | None = Field(default=None, description="(+) only length and stop strings end")
    skip_special_tokens: Flag | None = Field(default=None, description="(+)")
    timeout: Number | None = Field(
        default=None, gt=0, le=86_400, description="(+) seconds until the request is given up"
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="(+) share caches only with equal salts"
    )
    priority: Integer | None = Field(
        default=None, ge=-1000, le=1000, description="(+) smaller is served first, under the priority policy"
    )


class ImageUpload(Wire):
    """url: as in a message. detail, max_pixels, min_pixels: as later requests will have them; others encode it anew."""

    url: str = Field(min_length=1)
    model: str | None = None
    detail: Literal["auto", "low", "medium", "high"] = Field(default="auto", description="(+) medium")
    max_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    cache_salt: str | None = Field(
        default=None, max_length=256, description="as in the requests that will name it"
    )
    timeout: Number | None = Field(default=None, gt=0, le=86_400)
    encode: Flag = Field(default=True, description="encode it now, before any question")


class VisualTokensBody(Wire):
    """How many of an image's visual tokens are kept, and by what. A preset stands alone; else keep or budget. Neither: what
    the image asks for by itself, where relevance chooses, and half of its tokens elsewhere. The method views divides the
    tokens of all images."""

    preset: Literal["document", "general", "fast"] | None = None
    method: Word | None = Field(default=None, description="default: relevance")
    keep: Number | None = Field(default=None, gt=0, le=1, description="share of each image's tokens")
    budget: Integer | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="tokens of each image; views: of all"
    )
    explain: Flag = Field(default=False, description="say in the answer what was seen where; relevance can")


class ChatRequest(Sampling):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: Flag | None = False
    top_logprobs: Integer | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    max_pixels: Integer | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="(+) budget of every image without its own"
    )
    min_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT, description="(+)")
    video_pruning_rate: Number | None = Field(
        default=None, ge=0, le=0.95, description="(+) of every video without its own"
    )
    visual_tokens: VisualTokensBody | None = Field(
        default=None, description="(+) fewer visual tokens of every image"
    )
    metadata: dict[Word, Word] | None = Field(default=None, max_length=64, description="no effect")
    store: Flag | None = Field(default=None, description="no effect")
    service_tier: Word | None = Field(default=None, description="no effect")
    safety_identifier: Word | None = Field(default=None, description="no effect")
    prompt_cache_key: Word | None = Field(default=None, description="no effect")


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
        | list[Integer]
        | Annotated[list[list[Integer]], Field(max_length=MAX_PROMPTS)]
    )
    logprobs: Integer | None = Field(default=None, ge=0, le=20)


class TokenizeRequest(Body):
    """Either `prompt` or `messages`, as in completions and chat completions."""

    model: Word | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_ITEMS)
    max_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    video_pruning_rate: Number | None = Field(default=None, ge=0, le=0.95)
    visual_tokens: VisualTokensBody | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    image_tokens: int = 0


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(BaseModel):
    error: ErrorBody


UNSUPPORTED = {
    "tools": "tool calls are not supported",
    "tool_choice": "tool calls are not supported",
    "parallel_tool_calls": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "function_call": "tool calls are not supported",
    "tool_calls": "tool calls are not supported",
    "tool_call_id": "tool calls are not supported",
    "audio": "audio is not supported",
    "modalities": "only text is produced",
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "reasoning effort is not supported",
    "web_search_options": "web search is not supported",
    "echo": "echo is not supported",
    "suffix": "suffix is not supported",
    "best_of": "best_of is not supported; use n",
}
