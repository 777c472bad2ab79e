"""Converts what a Python caller passes (text, messages, images, videos, options) into a request."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fovea.core.constraints import ToolCall
from fovea.core.errors import InvalidImage, InvalidMedia, InvalidRequest, InvalidVideo
from fovea.core.media import Image, PixelBudget, Video, VideoBudget, video_of_images
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
    in_order_of_calls,
)
from fovea.media.image.decode import decode, from_pil
from fovea.media.limits import MediaLimits
from fovea.media.source import InlineSource, parse_source
from fovea.media.video import open_video
from fovea.media.video_container import container_of

if TYPE_CHECKING:
    import PIL.Image

LIMITS = MediaLimits()
_MEDIA_FIELDS = ("images", "image", "image_url", "videos", "video", "video_url", "attachments")
"""Fields in which other libraries expect media beside a message's content."""
LONGEST_FOUND = 100
"""Characters of a message about the fields of a value."""
_URL = re.compile(r"\s*(data:|https?://)", re.IGNORECASE)
ImageLike: TypeAlias = "Image | str | Path | bytes | bytearray | PIL.Image.Image"
"""An image from a Python caller: a path, encoded bytes, a data: URL, a PIL image, or a
`fovea.core.media.Image`.
"""
Images: TypeAlias = "Sequence[ImageLike] | ImageLike"
"""Images from a Python caller: several in order, or one alone."""
VideoLike: TypeAlias = "Video | str | Path | bytes | bytearray | Sequence[ImageLike]"
"""A video from a Python caller: a path, encoded bytes, frames of one size in order, or a
`fovea.core.media.Video`.
"""
PromptLike: TypeAlias = "str | Prompt | GenerationRequest | Sequence[Mapping[str, Any]]"
"""A prompt from a Python caller: a question, OpenAI-style messages, a Prompt, or a whole request."""


class RequestOptions(SamplingOptions, total=False):
    """Keyword arguments of `Engine.generate`, `stream` and `request`, beside the sampling options.

    sampling: all sampling parameters in one value; then no sampling option may be given.
    budget: detail level and bounds of the images.
    videos: inserted after the images, before the question; several, or one path, file or Video.
    video_budget: which frames of the videos are used.
    cache_salt: requests with different salts share no cache.
    kv_keep: which keys and values are kept: "all", or METHOD:AMOUNT as in the setting.
    prediction: text that the answer is likely to contain, such as the file that it changes a little.
    speculate: False: no drafter expects tokens of this answer.
    timeout: seconds after which the request is given up.
    priority: with the policy "priority", requests with smaller numbers go first.
    """

    sampling: SamplingParams | None
    budget: PixelBudget | None
    videos: Sequence[VideoLike] | VideoLike
    video_budget: VideoBudget | None
    cache_salt: str
    kv_keep: str | None
    prediction: str
    speculate: bool
    timeout: float | None
    priority: int


OWN_OPTIONS = frozenset(RequestOptions.__annotations__) - frozenset(SamplingOptions.__annotations__)
"""Options of a request that are not sampling parameters."""


def to_request(
    prompt: PromptLike, images: Images, options: RequestOptions, defaults: Mapping[str, Any]
) -> GenerationRequest:
    """Return the request for the arguments of `Engine.generate`, with decoded images.

    defaults: the checkpoint's sampling parameters.

    Raises InvalidRequest for unknown options and for options that exclude each other.
    """
    if isinstance(prompt, GenerationRequest):
        if _several(images, "images") or any(options.values()):
            raise InvalidRequest("a GenerationRequest is complete; it takes no other argument")
        return prompt
    own = {name: options[name] for name in OWN_OPTIONS if name in options}  # type: ignore[literal-required]
    params = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    sampling = own.get("sampling")
    if sampling is not None and params:
        raise InvalidRequest(
            f"{next(iter(params))} cannot be given together with sampling; set it in sampling"
        )
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=to_prompt(prompt, images, own.get("budget"), own.get("videos", ()), own.get("video_budget")),
        sampling=sampling or to_sampling(params, defaults),
        cache_salt=own.get("cache_salt", ""),
        kv_keep=own.get("kv_keep"),
        prediction=own.get("prediction", ""),
        speculate=own.get("speculate", True),
        timeout=own.get("timeout"),
        priority=own.get("priority", 0),
    )


def to_sampling(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters; those not in `params` are taken from `defaults`.

    Raises InvalidRequest for unknown names.
    """
    known = {field.name for field in fields(SamplingParams)}
    unknown = sorted(set(params) - known)
    if unknown:
        raise InvalidRequest(
            f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(known))}", param=unknown[0]
        )
    return SamplingParams(**{**defaults, **params})


def to_image(value: ImageLike) -> Image:
    """Return the decoded image. Raises InvalidImage."""
    if isinstance(value, Image):
        return value
    if isinstance(value, str) and _URL.match(value):
        source = parse_source(value, LIMITS)
        if not isinstance(source, InlineSource):
            raise InvalidImage(
                f"the Python API downloads nothing, got {value[:100]!r}; accepted: a path, bytes, "
                "a data: URL or a PIL image"
            )
        return decode(source.read(LIMITS), LIMITS)
    if isinstance(value, bytes | bytearray | str | Path):
        return decode(_read(value, InvalidImage), LIMITS)
    if hasattr(value, "convert") and hasattr(value, "size"):
        return from_pil(value)
    raise InvalidImage(
        f"{type(value).__name__} is not an image; accepted: path, bytes, PIL image, fovea Image"
    )


def to_video(value: VideoLike) -> Video:
    """Return the opened video. Raises InvalidVideo."""
    if isinstance(value, Video):
        return value
    if isinstance(value, bytes | bytearray | str | Path):
        return open_video(_read(value, InvalidVideo), LIMITS)
    if isinstance(value, Sequence):
        try:
            return video_of_images([_image_at(index, frame) for index, frame in enumerate(value)])
        except InvalidImage as error:
            raise InvalidVideo(f"frame {error.index}: {error.reason}") from error
        except ValueError as error:
            raise InvalidVideo(f"{error}; accepted: one frame or more, all of one size") from error
    raise InvalidVideo(
        f"{type(value).__name__} is not a video; accepted: path, bytes, a list of frames, fovea Video"
    )


def _read(value: bytes | bytearray | str | Path, invalid: type[InvalidImage | InvalidVideo]) -> bytes:
    """Return the bytes, or those of the file at a path. Raises `invalid` if the file cannot be read."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    path = Path(value).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}") from error


def is_video(path: str | Path) -> bool:
    """Tell whether a file exists and begins like a supported video."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return container_of(file.read(16)) is not None
    except OSError:
        return False


def to_prompt(
    prompt: PromptLike,
    images: Images = (),
    budget: PixelBudget | None = None,
    videos: Sequence[VideoLike] | VideoLike = (),
    video_budget: VideoBudget | None = None,
) -> Prompt:
    """Convert a question, OpenAI-style messages, or a Prompt into a Prompt.

    images, videos: come before a question; several, or one alone. With messages they are content parts.
    budget, video_budget: apply to all images and videos.
    Raises InvalidRequest or InvalidMedia, naming the message and the part.
    """
    images, videos = _several(images, "images"), _several(videos, "videos")
    if isinstance(prompt, ChatPrompt | TextPrompt | TokenPrompt):
        arguments = {"images": images, "budget": budget, "videos": videos, "video_budget": video_budget}
        name = next((name for name, value in arguments.items() if value), None)
        if name is not None:
            raise InvalidRequest(
                f"{name} cannot be given with a {type(prompt).__name__}; images, videos and budgets belong "
                "into the parts of a ChatPrompt or TextPrompt itself",
                param=name,
            )
        return prompt
    budget = budget or PixelBudget()
    if isinstance(prompt, str):
        pictures = tuple(ImagePart(_image_at(index, image), budget) for index, image in enumerate(images))
        clips = tuple(
            VideoPart(_video_at(index, video), video_budget or VideoBudget())
            for index, video in enumerate(videos)
        )
        return ChatPrompt((Message("user", (*pictures, *clips, TextPart(prompt))),), budget.visual)
    for kind, media in (("image", images), ("video", videos)):
        if media:
            raise InvalidRequest(f"with messages, {kind}s are content parts of type {kind}", param=f"{kind}s")
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidRequest(
            f"a prompt is text, messages (at least one), or a Prompt; got {_found(prompt)}", param="messages"
        )
    conversation = _Conversation(budget, video_budget or VideoBudget())
    messages = [_message(m, f"messages[{i}]", conversation) for i, m in enumerate(prompt)]
    return ChatPrompt(in_order_of_calls(messages), budget.visual)


@dataclass(slots=True)
class _Conversation:
    """The budgets of all messages of a conversation, and the number of images and videos so far."""

    budget: PixelBudget
    video_budget: VideoBudget
    images: int = 0
    videos: int = 0


def _several(media: Any, name: str) -> Sequence[Any]:
    """Return a list of images or videos; one alone is a list of one."""
    if isinstance(media, str | bytes | bytearray | Path | Image | Video) or hasattr(media, "convert"):
        return (media,)
    if not isinstance(media, Sequence):
        kind = type(media).__name__
        raise InvalidRequest(
            f"{name} is a {kind}; accepted: a list, or one alone, such as a path", param=name
        )
    return media


def _image_at(index: int, value: Any) -> Image:
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
    calls = _calls(value, where) if isinstance(value, Mapping) else ()
    if not isinstance(value, Mapping) or "role" not in value or not ("content" in value or calls):
        raise InvalidRequest(
            f"a message needs a role, and content or tool_calls; got {_found(value)}", param=where
        )
    role, content = value["role"], value.get("content")
    if not isinstance(role, str):
        raise InvalidRequest(f"role must be text, got {role!r}", param=f"{where}.role")
    if calls and role != "assistant":
        raise InvalidRequest(
            f"tool_calls are accepted in messages of the assistant, not in those of {role}",
            param=f"{where}.tool_calls",
        )
    lost = next((name for name in _MEDIA_FIELDS if value.get(name) is not None), None)
    if lost is not None:
        raise InvalidRequest(
            f"a message has no field {lost!r}, got {_found(value[lost])}; images and videos are parts of its "
            "content",
            param=f"{where}.{lost}",
        )
    parts = () if calls and not content else _parts(content, f"{where}.content", conversation)
    if role == "tool":
        call_id, name = (str(value.get(field) or "") for field in ("tool_call_id", "name"))
        return Message(role, parts, call_id=call_id, name=name)
    if role == "assistant":
        reasoning = str(value.get("reasoning_content") or value.get("reasoning") or "")
        return Message(role, parts, calls, reasoning=reasoning)
    return Message("system" if role == "developer" else role, parts)


def _parts(content: Any, where: str, conversation: _Conversation) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"content must be text or a list of parts, got {_found(content)}", param=where)
    return tuple(_part(part, f"{where}[{i}]", conversation) for i, part in enumerate(content))


def _calls(message: Mapping[str, Any], where: str) -> tuple[ToolCall, ...]:
    """Return the tool calls of a message in OpenAI's form; arguments are JSON text, or a mapping."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise InvalidRequest(
                "a tool call is {'id': ..., 'function': {'name': text, 'arguments': JSON text}}, got "
                f"{_found(call if function is None else function)}",
                param=f"{where}.tool_calls[{index}]",
            )
        calls.append(ToolCall(name, arguments or "", call.get("id") or ""))
    return tuple(calls)


def _part(value: Any, where: str, conversation: _Conversation) -> Part:
    if isinstance(value, TextPart | ImagePart | VideoPart):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise InvalidRequest(
                f"a part of type text needs the field 'text' with a text, got {_found(value.get('text'))}",
                param=f"{where}.text",
            )
        return TextPart(value["text"])
    if kind == "image":
        if "image" not in value:
            raise InvalidRequest("a part of type image needs the field 'image'", param=f"{where}.image")
        conversation.images += 1
        return ImagePart(_image_at(conversation.images - 1, value["image"]), conversation.budget)
    if kind == "video":
        if "video" not in value:
            raise InvalidRequest("a part of type video needs the field 'video'", param=f"{where}.video")
        conversation.videos += 1
        return VideoPart(_video_at(conversation.videos - 1, value["video"]), conversation.video_budget)
    found = f"part of type {kind!r}" if isinstance(value, Mapping) else f"the part is {_found(value)}"
    raise InvalidRequest(f"{found}; accepted: parts of type text, image, video", param=where)


def _found(value: Any) -> str:
    """Describe a value in an error message: the fields of a mapping, or the type of another value."""
    if isinstance(value, Mapping):
        return f"the fields {', '.join(map(str, value))}"[:LONGEST_FOUND] if value else "no fields"
    if value is None or (isinstance(value, Sequence) and not value):
        return repr(value)
    return f"a value of type {type(value).__name__}"
