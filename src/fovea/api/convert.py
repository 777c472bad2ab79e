"""Conversion between the wire models of the API and the values of core, and models of usage and errors.

Docstrings and descriptions of the models are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from fovea.api.answer_format import answer_format
from fovea.api.content import (
    ChatMessage,
    ImageContent,
    ImageURL,
    RefusalContent,
    TextContent,
    VideoContent,
    VideoURL,
    tool_calls,
    tool_use,
)
from fovea.api.schema import ChatRequest, CompletionRequest, MediaOptions, Sampling, VisualTokensBody
from fovea.api.wire import Wire
from fovea.core.errors import InvalidRequest, PromptTooLong, RequestError
from fovea.core.media import Image, ImageUse, Payload, PixelBudget, Video, VideoBudget, VisualTokens
from fovea.core.sampling import SamplingParams
from fovea.core.types import (
    ChatPrompt,
    ImagePart,
    Message,
    Part,
    Prompt,
    StageTimings,
    TemplateInputs,
    TextPart,
    TextPrompt,
    TokenPrompt,
    Usage,
    VideoPart,
    in_order_of_calls,
)


class PromptTokensDetails(BaseModel):
    """Parts of the number of prompt tokens."""

    cached_tokens: int = Field(
        default=0, description="Prompt tokens whose KV was already cached from an earlier request."
    )
    image_tokens: int = Field(
        default=0, description="Extension. Prompt tokens that stand for images or videos."
    )
    dropped_tokens: int = Field(
        default=0,
        description="Extension. Tokens of prompt and answer whose keys and values were left out (`kv_keep`).",
    )


class CompletionTokensDetails(BaseModel):
    """Parts of the number of tokens of the answers."""

    reasoning_tokens: int = Field(default=0, description="Tokens in which the model reasoned.")
    accepted_prediction_tokens: int = Field(
        default=0, description="Tokens that were taken from `prediction`, so that they needed no step each."
    )
    rejected_prediction_tokens: int = Field(
        default=0,
        description="Tokens of `prediction` that were computed and did not follow. They are not counted as "
        "tokens of the answer.",
    )
    draft_tokens: int = Field(
        default=0, description="Extension. Expected tokens that were computed, from all sources."
    )
    accepted_draft_tokens: int = Field(
        default=0, description="Extension. Those of them that became part of an answer."
    )


class UsageBody(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ErrorBody(BaseModel):
    """The reason why a request was refused or failed."""

    message: str = Field(description="The fault, its place, and the accepted values, for people.")
    type: str = Field(description="Kind of error in OpenAI's terms.")
    param: str | None = Field(default=None, description="JSON path of the wrong field of the request.")
    code: str | None = Field(default=None, description="Stable name of the error, for programs.")


class ErrorEnvelope(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorBody


Media = tuple[Iterator[Image], Iterator[Video]]
"""The loaded images and videos of a conversation, each taken by the part that refers to it."""
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A reference to an image or a video of a request, which is not fetched yet.

    url: the URL that the client sent. param: its JSON path in the request, for errors.
    """

    url: str | Payload
    param: str


def image_references(messages: Sequence[ChatMessage]) -> list[MediaReference]:
    """References to all images of a conversation, in order.

    Errors count images by their index in this list.
    """
    return _references(messages, ImageContent, "image_url")


def video_references(messages: Sequence[ChatMessage]) -> list[MediaReference]:
    """References to all videos of a conversation, in order. They are counted separately from images."""
    return _references(messages, VideoContent, "video_url")


def _references(messages: Sequence[ChatMessage], kind: type, field: str) -> list[MediaReference]:
    return [
        MediaReference(getattr(part, field).url, f"messages[{i}].content[{j}].{field}.url")
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, kind)
    ]


def chat_prompt(body: ChatRequest, images: Sequence[Image], videos: Sequence[Video] = ()) -> ChatPrompt:
    """Build the prompt of a conversation.

    images, videos: loaded media, one for each reference of `image_references` and `video_references`, in
        order.

    Raises InvalidRequest for an empty message, media outside user messages, or contradicting `visual_tokens`.
    """
    visual = None if body.visual_tokens is None else visual_tokens(body.visual_tokens)
    media = iter(images), iter(videos)
    messages = [_message(m, f"messages[{i}]", media, body) for i, m in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    if continues and messages[-1].role != "assistant":
        raise InvalidRequest(
            f"continue_final_message needs a last message of the assistant, not of {messages[-1].role}",
            param="continue_final_message",
        )
    template = TemplateInputs(tool_use(body).offered, _template_arguments(body), continues)
    return ChatPrompt(in_order_of_calls(messages), visual, template)


def _template_arguments(body: ChatRequest) -> dict[str, Any]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
        arguments.setdefault("enable_thinking", body.reasoning_effort != "none")
    return arguments


def _message(message: ChatMessage, param: str, media: Media, body: ChatRequest) -> Message:
    role = "system" if message.role == "developer" else message.role
    calls = tool_calls(message.tool_calls)
    if calls and role != "assistant":
        raise InvalidRequest(
            f"tool_calls are accepted in messages of the assistant, not in those of {message.role}",
            param=f"{param}.tool_calls",
        )
    said = role == "assistant" and (message.reasoning_content or message.reasoning or message.refusal)
    if message.content in (None, []) and not calls and not said:
        raise InvalidRequest("a message needs content: text, or a list of parts", param=f"{param}.content")
    parts = tuple(_parts(message, role, param, media, body))
    if role == "tool":
        return Message(role, parts, call_id=message.tool_call_id or "", name=message.name or "")
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning or ""
        return Message(role, parts, calls, reasoning=reasoning)
    return Message(role, parts)


def _parts(
    message: ChatMessage,
    role: str,
    param: str,
    media: tuple[Iterator[Image], Iterator[Video]],
    body: ChatRequest,
) -> Iterator[Part]:
    if isinstance(message.content, str):
        yield TextPart(message.content)
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, TextContent):
            yield TextPart(part.text)
            continue
        place = f"{param}.content[{index}]"
        if isinstance(part, RefusalContent):
            if role != "assistant":
                raise InvalidRequest(
                    f"refusals are accepted in messages of the assistant, not in those of {message.role}",
                    param=place,
                )
            yield TextPart(part.refusal)
        elif role not in ("user", "tool"):
            noun = "images" if isinstance(part, ImageContent) else "videos"
            raise InvalidRequest(
                f"{noun} are accepted in user and tool messages, not in {message.role} messages", param=place
            )
        elif isinstance(part, ImageContent):
            yield ImagePart(next(media[0]), budget(part.image_url, body))
        else:
            yield VideoPart(next(media[1]), video_budget(part.video_url, body))
    if message.refusal and role == "assistant":
        yield TextPart(message.refusal)


def budget(image: ImageURL, body: ChatRequest) -> PixelBudget:
    """The resolution limits of one image: its own ones, or those of the request where it has none."""
    options = body.mm_processor_kwargs or MediaOptions()
    return PixelBudget(
        detail=image.detail,
        min_pixels=image.min_pixels or body.min_pixels or options.min_pixels,
        max_pixels=image.max_pixels or body.max_pixels or options.max_pixels,
        visual=None if body.visual_tokens is None else visual_tokens(body.visual_tokens),
    )


def visual_tokens(body: VisualTokensBody) -> VisualTokens:
    """Convert the field `visual_tokens`. Raises InvalidRequest if its fields contradict each other."""
    if body.preset is None:
        method = "relevance" if body.method is None else body.method
        return VisualTokens(method, body.keep, body.budget, body.explain)
    if body.method or body.keep or body.budget:
        raise InvalidRequest(
            "visual_tokens: a preset sets the method and the number of tokens; accepted beside it: explain",
            param="visual_tokens.preset",
        )
    return VisualTokens(body.preset, explain=body.explain)


def video_budget(video: VideoURL, body: ChatRequest) -> VideoBudget:
    """The sampling limits of one video.

    Its pruning rate is its own one, or that of the request where it has none.
    """
    own = video.video_pruning_rate
    rate = (body.video_pruning_rate or 0.0) if own is None else own
    return VideoBudget(video.fps, video.min_frames, video.max_frames, video.max_pixels, rate)


def completion_prompts(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion request: one per string or per list of token ids.

    Raises InvalidRequest if there are none.
    """
    if isinstance(body.prompt, str):
        return [TextPrompt(body.prompt)]
    parts: list[Any] = body.prompt
    if not parts:
        raise InvalidRequest("prompt is empty; accepted: a string, strings, or token ids", param="prompt")
    if isinstance(parts[0], int):
        return [TokenPrompt(tuple(parts))]  # validated: all of one kind
    return [TextPrompt(part) if isinstance(part, str) else TokenPrompt(tuple(part)) for part in parts]


def sampling(body: Sampling, defaults: Mapping[str, float | int]) -> SamplingParams:
    """The sampling parameters of a request. Raises InvalidRequest, which names the wrong field.

    defaults: the checkpoint's values for fields that the request leaves out.
    """
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "min_tokens", "ignore_eos", "skip_special_tokens", "n", "max_tokens",
        "include_stop_str_in_output", "prompt_logprobs",
    )  # fmt: skip
    values: dict[str, Any] = dict(defaults)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs needs stream: false", param="prompt_logprobs")
    values |= {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.stop:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if getattr(body, name):
            values[name] = tuple(getattr(body, name))
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    form = answer_format(body)
    if form is not None:
        values["format"] = form
    if isinstance(body, ChatRequest):
        values |= _chat_fields(body)
    elif isinstance(body, CompletionRequest):
        values |= {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
    return SamplingParams(**values)


def _chat_fields(body: ChatRequest) -> dict[str, Any]:
    values: dict[str, Any] = {"logprobs": bool(body.logprobs), "top_logprobs": body.top_logprobs or 0}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, -1, body.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
        values["max_tokens"] = body.max_completion_tokens
    return values


def _logit_bias(raw: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for token, value in raw.items():
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest(f"logit_bias: {token[:64]!r} is not a token id", param="logit_bias")
        bias[int(token)] = value
    return bias


@contextmanager
def wire_names(body: Wire) -> Iterator[None]:
    """Rename fields in errors of the block from the core's names to those that the client sent.

    The errors are RequestErrors. The core calls a text prompt "text", for example, and the client "prompt".
    """
    try:
        yield
    except RequestError as error:
        name = error.param
        if name in ("messages", "text") and getattr(body, "prompt", None) is not None:
            name = "prompt"
        elif name == "max_tokens" and isinstance(error, PromptTooLong):
            name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else name
        if name is not None and error.param is not None:
            error.message = re.sub(rf"^{re.escape(error.param)}\b", name, error.message)
        error.param = name
        raise


def usage_body(usage: Usage) -> UsageBody:
    """The token counts of an answer in OpenAI's form."""
    return UsageBody(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached, image_tokens=usage.image, dropped_tokens=usage.dropped
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=usage.reasoning,
            accepted_prediction_tokens=usage.accepted_prediction,
            rejected_prediction_tokens=usage.rejected_prediction,
            draft_tokens=usage.drafts,
            accepted_draft_tokens=usage.accepted_drafts,
        ),
    )


def extension_body(timings: StageTimings, images: Sequence[ImageUse]) -> dict[str, Any]:
    """The `fovea` field of an answer: times of the stages, and each image's detail level with its reason."""
    body: dict[str, Any] = {"timings_ms": timings_body(timings)}
    if images:
        body["images"] = [_image_body(image) for image in images]
    return body


def _image_body(image: ImageUse) -> dict[str, Any]:
    body: dict[str, Any] = {"detail": image.detail, "visual_tokens": image.tokens, "reason": image.reason}
    if image.method is not None:
        body |= {"method": image.method, "of": image.full}
    if image.relevance is not None:
        body["relevance"] = image.relevance
    return body


def timings_body(timings: StageTimings) -> dict[str, float]:
    """The milliseconds of each stage, for the `fovea` field of an answer."""
    names = ("fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode", "ttft")
    return {name: round(getattr(timings, name) * 1000, 3) for name in names}
