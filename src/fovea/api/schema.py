"""Wire models of requests: OpenAI's fields, and the extensions that this server documents.

Fields that have no effect on an answer (user, metadata and others) are accepted. The server decides about
fields that are not declared here. Docstrings and descriptions of this module are part of the OpenAPI
description at /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fovea.api.answer_format import FormatFields
from fovea.api.content import DETAIL, MAX_PIXELS, MIN_PIXELS, NO_EFFECT, URL, ChatMessage, Detail, ToolFields
from fovea.api.wire import (
    MAX_COUNT,
    MAX_ITEMS,
    Body,
    Flag,
    Integer,
    Number,
    Prompts,
    Text,
    TokenIds,
    Url,
    Wire,
    Word,
    option,
)
from fovea.core.errors import InvalidRequest
from fovea.core.media import AUTO
from fovea.core.sampling import MAX_CHOICES, MAX_REPETITION_PENALTY, MAX_STOP_STRINGS, MIN_REPETITION_PENALTY
from fovea.core.types import MAX_PREDICTION

MODEL = "Name of the served model. May be omitted."
MAX_TOKENS = (
    "Longest answer in tokens. -1 (extension): as many as the context has room for. Default: -1; 16 at "
    "/v1/completions."
)
SALT = "Extension. Requests share cached results only if their salts are equal."
KV_KEEP = (
    "Extension. Which keys and values are kept: all, or METHOD:AMOUNT, such as snap:0.25 (a share of the "
    "prompt) or snap:4096 (at most so many tokens, from 128 on). Methods: window, snap, text, images. "
    "Fewer kept tokens make long answers faster and are lossy. Default: the server's setting."
)
SPECULATE = (
    "Extension. Whether the server may expect tokens of the answer, of which one step verifies several. "
    "The answer is the same. false: no drafter expects tokens of this answer. Default: true."
)
TIMEOUT = (
    "Extension. Seconds after which the request is aborted with status 408. Default: the server's setting."
)
ALL_MAX_PIXELS = "Extension. `max_pixels` of every image that has none of its own."
ALL_MIN_PIXELS = "Extension. `min_pixels` of every image that has none of its own."
ALL_PRUNING = "Extension. `video_pruning_rate` of every video that has none of its own. Default: 0."
VISUAL_TOKENS = "Extension. Reduces the number of visual tokens of every image."


class StreamOptions(Wire):
    """Options of a stream. They require `stream: true`."""

    include_usage: Flag | None = Field(
        default=False, description="Send a chunk with the token counts before the stream ends."
    )
    continuous_usage_stats: Flag | None = option("Extension. Send the token counts so far with every chunk.")
    include_obfuscation: Flag | None = option(NO_EFFECT)


class Sampling(Body, FormatFields):
    """Fields that chat completions and text completions have in common.

    Sampling fields that are omitted or null default to the checkpoint's generation_config.json, then to
    OpenAI's default.
    """

    model: Word | None = option(MODEL)
    temperature: Number | None = option(
        "Randomness of the answer. 0: always the most likely token.", ge=0, le=2
    )
    top_p: Number | None = option(
        "Sample from the most likely tokens that together have this probability.", gt=0, le=1
    )
    n: Integer | None = Field(
        default=1, ge=1, le=MAX_CHOICES, description="Number of independent answers to each prompt."
    )
    stream: Flag | None = Field(
        default=False, description="Send the answer as server-sent events while it is generated."
    )
    stream_options: StreamOptions | None = None
    stop: Word | Annotated[list[Word], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = option(
        "Up to 16 non-empty strings that end the answer. The answer does not include them. An "
        "empty string alone means none."
    )
    max_tokens: Integer | None = option(MAX_TOKENS, ge=-1, le=MAX_COUNT)
    presence_penalty: Number | None = option(
        "Subtracted once from the logit of every token that the answer contains.", ge=-2, le=2
    )
    frequency_penalty: Number | None = option(
        "Subtracted from the logit of a token once for each time that the answer contains it.", ge=-2, le=2
    )
    logit_bias: dict[str, Number] | None = option(
        "Token id to a value from -100 to 100 that is added to the token's logit.", max_length=1024
    )
    seed: Integer | None = option(
        "Seed of the random numbers. Equal requests with equal seeds get equal answers (up to "
        "rounding on torch and CUDA). -1 (extension): a random one.",
        ge=-(2**63),
        lt=2**63,
    )
    user: Word | None = option(NO_EFFECT)
    top_k: Integer | None = option(
        "Extension. Sample from this many most likely tokens. 0 or -1: all tokens.", ge=-1, le=MAX_COUNT
    )
    min_p: Number | None = option(
        "Extension. Least probability of a token, as a share of that of the most likely token.", ge=0, le=1
    )
    repetition_penalty: Number | None = option(
        "Extension. Divides positive and multiplies negative logits of all tokens that the "
        "prompt or the answer contains. 1: no effect.",
        ge=MIN_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
    )
    min_tokens: Integer | None = option(
        "Extension. The answer does not end before this many tokens.", ge=0, le=MAX_COUNT
    )
    stop_token_ids: Annotated[list[Integer], Field(fail_fast=True)] | None = option(
        "Extension. Token ids that end the answer.", max_length=64
    )
    ignore_eos: Flag | None = option(
        "Extension. The model's own end tokens do not end the answer. Only the maximum length, "
        "`stop` and `stop_token_ids` do."
    )
    skip_special_tokens: Flag | None = option(
        "Extension. Whether special tokens are left out of the answer's text. Default: true."
    )
    allowed_token_ids: Annotated[list[Integer], Field(fail_fast=True)] | None = option(
        "Extension. The only token ids that the answer may contain, its end tokens included.", max_length=4096
    )
    bad_words: Annotated[list[Word], Field(fail_fast=True)] | None = option(
        "Extension. Texts whose tokens do not occur in the answer one after the other.", max_length=64
    )
    include_stop_str_in_output: Flag | None = option(
        "Extension. Whether the answer includes the stop string that ended it."
    )
    prompt_logprobs: Integer | None = option(
        "Extension. Report the log probability of each token of the prompt, and of this many "
        "most likely tokens. Not with `stream`. The prompt is computed as a whole then, whatever is cached.",
        ge=0,
        le=20,
    )
    return_token_ids: Flag | None = option(
        "Extension. Whether each choice contains the ids of its tokens, `token_ids`, and the "
        "answer those of the prompt, `prompt_token_ids`."
    )
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = option(
        "Extension. Becomes a part of the answer's `id`. Default: a random one."
    )
    timeout: Number | None = option(TIMEOUT, gt=0, le=86_400)
    cache_salt: str | None = option(SALT, max_length=256)
    kv_keep: Word | None = option(KV_KEEP)
    speculate: Flag | None = option(SPECULATE)
    priority: Integer | None = option(
        "Extension. Requests with smaller numbers are served first, if the server uses the "
        "priority policy. Default: 0.",
        ge=-1000,
        le=1000,
    )


class ImageUpload(Body):
    """An image that later requests name by the URL fovea-image://ID.

    `detail`, `max_pixels`, `min_pixels` and `cache_salt` should have the values of these requests. A request
    with other values encodes the image again.
    """

    url: Url = Field(description=f"{URL}.")
    model: Word | None = option(MODEL)
    detail: Detail = Field(default="auto", description=DETAIL)
    max_pixels: Integer | None = option(MAX_PIXELS, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = option(MIN_PIXELS, ge=1, le=MAX_COUNT)
    cache_salt: str | None = option(SALT, max_length=256)
    timeout: Number | None = option(TIMEOUT, gt=0, le=86_400)
    encode: Flag = Field(
        default=True, description="Whether the image is encoded now, before the first request that names it."
    )


def _share(value: Any) -> Any:
    real = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if value is not None and value != AUTO and not real:
        raise ValueError("must be a number of more than 0 and at most 1, or 'auto'")
    return value


Share = Annotated[Literal["auto"] | Annotated[float, Field(gt=0, le=1)], BeforeValidator(_share)]


class VisualTokensBody(Wire):
    """The number of visual tokens that each image keeps, and the method that chooses them.

    A `preset` sets method and number, so `method`, `keep` and `budget` must be absent then. Otherwise at most
    one of `keep` and `budget` may be given. Without both, the method relevance keeps as many as the question
    needs, as with `"keep": "auto"`, and other methods keep half of the tokens.
    """

    preset: Literal["document", "general", "fast"] | None = option(
        "A method with its number of tokens under one name."
    )
    method: Word | None = option("Name of the method that chooses the tokens. Default: relevance.")
    keep: Share | None = option(
        "Share of each image's tokens to keep, more than 0 and at most 1; with the method views, of all "
        "images together. With the method relevance also `auto`: as many as the question needs."
    )
    budget: Integer | None = option(
        "Number of tokens of each image; with the method views, of all images together.", ge=1, le=MAX_COUNT
    )
    explain: Flag = Field(
        default=False,
        description="Whether the answer contains which region of each image got how many tokens, and why. "
        "Only the method relevance can explain this.",
    )


class MediaOptions(Wire):
    """Options of the processor of images. Others could change what images cost, and are refused."""

    max_pixels: Integer | None = option(ALL_MAX_PIXELS, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = option(ALL_MIN_PIXELS, ge=1, le=MAX_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _no_others(cls, value: Any) -> Any:
        others = (
            [name for name in value if name not in ("max_pixels", "min_pixels")]
            if isinstance(value, dict)
            else []
        )
        if others:
            name = str(others[0])[:64]
            raise InvalidRequest(
                f"mm_processor_kwargs.{name} cannot be set; accepted: max_pixels, min_pixels",
                param=f"mm_processor_kwargs.{name}",
            )
        return value


class PredictedText(Wire):
    """A part of a prediction."""

    type: Literal["text"]
    text: Text


class Prediction(Wire):
    """Text that the answer is likely to contain, such as a file of which it changes a few lines."""

    type: Literal["content"]
    content: Text | Annotated[list[PredictedText], Field(max_length=MAX_ITEMS, fail_fast=True)] = Field(
        description=f"The text, or its parts, which follow each other. At most {MAX_PREDICTION} characters."
    )

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling, ToolFields):
    """A request for an answer to a conversation.

    Sampling fields that are omitted or null default to the checkpoint's generation_config.json, then to
    OpenAI's default.
    """

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: Integer | None = option(
        "OpenAI's newer name of `max_tokens`.", ge=-1, le=MAX_COUNT
    )
    logprobs: Flag | None = Field(
        default=False, description="Whether the answer contains the log probability of each token."
    )
    top_logprobs: Integer | None = option(
        "Number of most likely tokens to report for each position. Requires `logprobs: true`.", ge=0, le=20
    )
    max_pixels: Integer | None = option(ALL_MAX_PIXELS, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = option(ALL_MIN_PIXELS, ge=1, le=MAX_COUNT)
    video_pruning_rate: Number | None = option(ALL_PRUNING, ge=0, le=0.95)
    visual_tokens: VisualTokensBody | None = option(VISUAL_TOKENS)
    mm_processor_kwargs: MediaOptions | None = option(
        "Extension, with vLLM's name: `min_pixels` and `max_pixels` of all images."
    )
    chat_template_kwargs: dict[Word, Any] | None = option(
        "Extension. Variables of the model's chat template, such as `enable_thinking`. Those "
        "that it does not know have no effect.",
        max_length=64,
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = option(
        "Passed to the chat template as `reasoning_effort`, and as `enable_thinking`, which is "
        "false for none. Templates that know neither ignore it."
    )
    include_reasoning: Flag | None = option(
        "Extension. Whether the answer contains the model's reasoning. Default: true."
    )
    continue_final_message: Flag | None = option(
        "Extension. Whether the answer continues the last message, one of the assistant, instead "
        "of beginning a new one."
    )
    add_generation_prompt: Flag | None = option(
        "Extension. false has no effect but with continue_final_message, where it is implied."
    )
    metadata: dict[Word, Word] | None = option(NO_EFFECT, max_length=64)
    store: Flag | None = option(NO_EFFECT)
    service_tier: Word | None = option(NO_EFFECT)
    safety_identifier: Word | None = option(NO_EFFECT)
    prompt_cache_key: Word | None = option(NO_EFFECT)
    prompt_cache_retention: Word | None = option(NO_EFFECT)
    prompt_cache_options: dict[Word, Any] | None = option(NO_EFFECT)
    prediction: Prediction | None = option(
        "OpenAI's predicted output: text that the answer is likely to contain. It is faster then, and the "
        "same, if the server speculates with hints."
    )
    verbosity: Word | None = option(NO_EFFECT)


class CompletionRequest(Sampling):
    """A request for text that continues one or several prompts, without a chat template.

    Sampling fields that are omitted or null default to the checkpoint's generation_config.json, then to
    OpenAI's default.
    """

    prompt: Prompts = Field(description="One prompt or a list of prompts, each as text or as token ids.")
    best_of: Integer | None = option(
        "Number of answers to each prompt; the `n` with the largest mean log "
        "probability per token are returned. Not with `stream`. Default: `n`.",
        ge=1,
        le=MAX_CHOICES,
    )
    echo: Flag | None = option(
        "Whether the answer begins with the prompt, with its log probabilities if `logprobs` is "
        "set. Not with `stream`. `max_tokens` may be 0 then."
    )
    logprobs: Integer | None = option(
        "Report the log probability of each token, and of this many most likely tokens.", ge=0, le=20
    )


class TokenizeRequest(Body):
    """A request for the token ids of a prompt or of a conversation.

    Exactly one of `prompt` and `messages` is required.
    """

    model: Word | None = option(MODEL)
    prompt: Text | None = option("Text, as in /v1/completions.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = option(
        "Messages, as in /v1/chat/completions.", min_length=1, max_length=MAX_ITEMS
    )
    max_pixels: Integer | None = option(ALL_MAX_PIXELS, ge=1, le=MAX_COUNT)
    min_pixels: Integer | None = option(ALL_MIN_PIXELS, ge=1, le=MAX_COUNT)
    video_pruning_rate: Number | None = option(ALL_PRUNING, ge=0, le=0.95)
    visual_tokens: VisualTokensBody | None = option(VISUAL_TOKENS)
    cache_salt: str | None = option(SALT, max_length=256)


class DetokenizeRequest(Body):
    """A request for the text of token ids."""

    model: Word | None = option(MODEL)
    tokens: TokenIds = Field(description="Token ids. Special tokens become their text.")
