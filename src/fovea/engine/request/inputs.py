"""Converts what a Python caller passes in (text, messages, pictures and videos in any usual form) into a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fovea.core.errors import InvalidImage, InvalidMedia, InvalidRequest, InvalidVideo
from fovea.core.image import Image, PixelBudget
from fovea.core.sampling import SamplingOptions, SamplingParams
from fovea.core.types import (
    ChatPrompt,
    GenerationRequest,
    ImagePart,
    Message,
    Part,
    Prompt,
    TextPart,
    TextPrompt,
    TokenPrompt,
    VideoPart,
)
from fovea.core.video import Video, VideoBudget, video_of_images
from fovea.media.image.decode import decode
from fovea.media.image.identity import from_pil
from fovea.media.limits import MediaLimits
from fovea.media.video.container import container_of
from fovea.media.video.decode import open_video

if TYPE_CHECKING:
    import PIL.Image

LIMITS = MediaLimits()
ImageLike: TypeAlias = "Image | str | Path | bytes | bytearray | PIL.Image.Image"
"""An image as callers have it: a path, encoded bytes, a PIL image, or a `fovea.core.image.Image`."""
VideoLike: TypeAlias = "Video | str | Path | bytes | bytearray | Sequence[ImageLike]"
"""A video as callers have it: a path, encoded bytes, frames of one size in order, or a `fovea.core.video.Video`."""
PromptLike: TypeAlias = "str | Prompt | GenerationRequest | Sequence[Mapping[str, Any]]"
"""A prompt as callers have it: a question, OpenAI-style messages, a Prompt, or a whole request."""


class RequestOptions(SamplingOptions, total=False):
    """Keyword arguments of `Engine.generate`, `Engine.stream` and `Engine.request`, beside the sampling options.

    sampling: all sampling parameters in one value; then no sampling option may be given.
    budget: how closely images are looked at.
    videos: put after the images, in front of the question.
    video_budget: which frames are looked at.
    cache_salt: requests with different salts share no cache.
    timeout: seconds after which the request is given up.
    priority: smaller numbers first, with the policy "priority".
    """

    sampling: SamplingParams | None
    budget: PixelBudget | None
    videos: Sequence[VideoLike]
    video_budget: VideoBudget | None
    cache_salt: str
    timeout: float | None
    priority: int


def to_image(value: ImageLike) -> Image:
    """Decode an image. Raises InvalidImage."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value), LIMITS)
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidImage(f"{path} cannot be read: {error.strerror}") from error
        return decode(data, LIMITS)
    if hasattr(value, "convert") and hasattr(value, "size"):
        return from_pil(value)
    raise InvalidImage(f"{type(value).__name__} is no image; accepted: path, bytes, PIL image, fovea Image")


def to_video(value: VideoLike) -> Video:
    """Open a video. Raises InvalidVideo."""
    if isinstance(value, Video):
        return value
    if isinstance(value, bytes | bytearray):
        return open_video(bytes(value), LIMITS)
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidVideo(f"{path} cannot be read: {error.strerror}") from error
        return open_video(data, LIMITS)
    if isinstance(value, Sequence):
        try:
            return video_of_images([_at(index, frame) for index, frame in enumerate(value)])
        except InvalidImage as error:
            raise InvalidVideo(f"frame {error.index}: {error.reason}") from error
        except ValueError as error:
            raise InvalidVideo(f"{error}; accepted: one frame or more, all of one size") from error
    raise InvalidVideo(
        f"{type(value).__name__} is no video; accepted: path, bytes, a list of frames, fovea Video"
    )


def is_video(path: str | Path) -> bool:
    """Whether a file exists and begins like a supported video."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return container_of(file.read(16)) is not None
    except OSError:
        return False


def to_prompt(
    prompt: PromptLike,
    images: Sequence[ImageLike] = (),
    budget: PixelBudget | None = None,
    videos: Sequence[VideoLike] = (),
    video_budget: VideoBudget | None = None,
) -> Prompt:
    """A question with its images and videos in front, OpenAI-style messages, or a Prompt, as a Prompt.

    Raises InvalidRequest or InvalidMedia, naming the message and the part.
    """
    if isinstance(prompt, ChatPrompt | TextPrompt | TokenPrompt):
        given = {"images": images, "budget": budget, "videos": videos, "video_budget": video_budget}
        what = next((name for name, value in given.items() if value), None)
        if what is not None:
            raise InvalidRequest(f"{what} must be in the prompt itself when it is not plain text", param=what)
        return prompt
    budget = budget or PixelBudget()
    if isinstance(prompt, str):
        pictures = tuple(ImagePart(_at(index, image), budget) for index, image in enumerate(images))
        clips = tuple(
            VideoPart(_video_at(index, video), video_budget or VideoBudget())
            for index, video in enumerate(videos)
        )
        return ChatPrompt((Message("user", (*pictures, *clips, TextPart(prompt))),))
    for name, given_beside in (("image", images), ("video", videos)):
        if given_beside:
            raise InvalidRequest(f"with messages, {name}s are content parts of type {name}", param=f"{name}s")
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidRequest("a prompt is text, messages (one at least), or a Prompt", param="messages")
    conversation = _Conversation(budget, video_budget or VideoBudget())
    return ChatPrompt(tuple(_message(m, f"messages[{i}]", conversation) for i, m in enumerate(prompt)))


@dataclass(slots=True)
class _Conversation:
    """The budgets of all messages of a conversation, and the number of images and videos so far."""

    budget: PixelBudget
    video_budget: VideoBudget
    images: int = 0
    videos: int = 0


def _at(index: int, value: Any) -> Image:
    try:
        return to_image(value)
    except InvalidImage as error:
        raise error.at(index) from error


def _video_at(index: int, value: Any) -> Video:
    try:
        return to_video(value)
    except InvalidMedia as error:
        raise error.at(index) from error


def _message(value: Any, where: str, conversation: _Conversation) -> Message:
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) or "role" not in value or "content" not in value:
        raise InvalidRequest("a message is a mapping with role and content", param=where)
    role, content = value["role"], value["content"]
    if not isinstance(role, str):
        raise InvalidRequest(f"role must be text, got {role!r}", param=f"{where}.role")
    if isinstance(content, str):
        return Message(role, (TextPart(content),))
    if not isinstance(content, Sequence):
        raise InvalidRequest("content must be text or a list of parts", param=f"{where}.content")
    parts = [_part(part, f"{where}.content[{i}]", conversation) for i, part in enumerate(content)]
    return Message(role, tuple(parts))


def _part(value: Any, where: str, conversation: _Conversation) -> Part:
    if isinstance(value, TextPart | ImagePart | VideoPart):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise InvalidRequest("a part of type text needs text", param=f"{where}.text")
        return TextPart(value["text"])
    if kind == "image":
        if "image" not in value:
            raise InvalidRequest("a part of type image needs image", param=f"{where}.image")
        conversation.images += 1
        return ImagePart(_at(conversation.images - 1, value["image"]), conversation.budget)
    if kind == "video":
        if "video" not in value:
            raise InvalidRequest("a part of type video needs video", param=f"{where}.video")
        conversation.videos += 1
        return VideoPart(_video_at(conversation.videos - 1, value["video"]), conversation.video_budget)
    raise InvalidRequest(f"part of type {kind!r}; accepted: text, image, video", param=where)
