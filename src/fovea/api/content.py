"""Wire models of a conversation: messages and their text, images and videos.

Docstrings and descriptions of this module are part of the OpenAPI description at /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from fovea.api.tools import MAX_TOOLS, ToolCallBody
from fovea.api.wire import MAX_COUNT, MAX_ITEMS, Integer, Number, Text, Url, Wire, Word
from fovea.core.payload import Payload


def _level(value: Any) -> Any:
    """Replace null (no choice) and OpenAI's newer "original" (the image's full size) by a detail level."""
    if value is None:
        return "auto"
    return "high" if value == "original" else value


Detail = Annotated[
    Literal["auto", "low", "medium", "high"],
    BeforeValidator(_level),
    WithJsonSchema({"enum": ["auto", "low", "medium", "high", "original", None]}),
]
NO_EFFECT = "Accepted, without effect."
SENT_BACK = (
    "Accepted, without effect. Answers of some servers contain this field, and clients send answers back."
)
REASONING = "Extension. What the assistant thought. Chat templates decide which of it the model reads again."
URL = "A data:, https:, http: or file: URL, as far as the server's settings allow it"
DETAIL = (
    "Number of visual tokens of the image. low: about 64; medium (extension): about 256; high, and original: "
    "the model's own limit; auto, and null: the server chooses."
)
MAX_PIXELS = "Extension. Upper bound on the pixels of the image after resizing. Overrides `detail`."
MIN_PIXELS = "Extension. Lower bound on the pixels of the image after resizing. Overrides `detail`."


def _as_object(value: Any) -> Any:
    """Some clients send the URL in place of the object."""
    return {"url": value} if isinstance(value, str | Payload) else value


class ImageURL(Wire):
    """An image of a message, and its resolution."""

    url: Url = Field(description=f"{URL}, or fovea-image://ID for an image that was sent to /v1/images.")
    detail: Detail = Field(default="auto", description=DETAIL)
    max_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT, description=MAX_PIXELS)
    min_pixels: Integer | None = Field(default=None, ge=1, le=MAX_COUNT, description=MIN_PIXELS)


class VideoURL(Wire):
    """A video of a message (extension), and how it is sampled.

    By default, the model's own video settings apply.
    """

    url: Url = Field(description=f"{URL}.")
    fps: Number | None = Field(
        default=None, gt=0, le=240, description="Extension. Frames sampled per second of video."
    )
    min_frames: Integer | None = Field(
        default=None, ge=1, le=4096, description="Extension. Least number of sampled frames."
    )
    max_frames: Integer | None = Field(
        default=None, ge=1, le=4096, description="Extension. Largest number of sampled frames."
    )
    max_pixels: Integer | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Extension. Upper bound on the pixels of one frame after resizing.",
    )
    video_pruning_rate: Number | None = Field(
        default=None,
        ge=0,
        le=0.95,
        description="Extension. Share of the video's visual tokens that are left out where little moves. "
        "Default: the request's `video_pruning_rate`.",
    )


class Part(Wire):
    """Fields that every part of a message may have."""

    cache_control: dict[Word, Any] | None = Field(default=None, description=NO_EFFECT)
    uuid: Word | None = Field(default=None, description=NO_EFFECT)


class TextContent(Part):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text
    annotations: list[Any] | None = Field(default=None, description=NO_EFFECT)


class RefusalContent(Part):
    """A part of a message of the assistant in which it refused to answer. The model reads its text."""

    type: Literal["refusal"]
    refusal: Text


class ImageContent(Part):
    """A part of a message that is an image. Only user messages may contain images."""

    type: Literal["image_url"]
    image_url: Annotated[ImageURL, BeforeValidator(_as_object)] = Field(
        description="An object, or its `url` alone."
    )


class VideoContent(Part):
    """A part of a message that is a video (extension). Only user messages may contain videos."""

    type: Literal["video_url"]
    video_url: VideoURL


# Lists fail at their first wrong entry: an error for each of thousands would take long and tell nothing more.
Content = Annotated[TextContent | ImageContent | VideoContent | RefusalContent, Field(discriminator="type")]


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Author of the message. developer means the same as system. tool: the result of a call."
    )
    content: Text | Annotated[list[Content], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = Field(
        default=None,
        description="Text, or a list of at least one part. Only a message of the assistant with tool calls, "
        "reasoning or a refusal may have none.",
    )
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="Calls that the assistant made in this message."
    )
    tool_call_id: Word | None = Field(
        default=None, description="In messages of the role tool: the call whose result this is."
    )
    name: Word | None = Field(default=None, description=NO_EFFECT)
    refusal: Text | None = Field(
        default=None,
        description="In messages of the assistant: text in which it refused to answer. The model reads it "
        "after `content`.",
    )
    reasoning: Text | None = Field(default=None, description=REASONING)
    reasoning_content: Text | None = Field(default=None, description=REASONING)
    annotations: list[Any] | None = Field(default=None, description=SENT_BACK)
    provider_specific_fields: dict[Word, Any] | None = Field(default=None, description=SENT_BACK)
