"""What a Python caller may hand in, as a prompt: text, OpenAI-style messages, pictures in any usual form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.image import Image, PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, Message, Part, Prompt, TextPart, TextPrompt, TokenPrompt
from fovea.media.decode import decode
from fovea.media.identity import from_pil
from fovea.media.limits import MediaLimits

LIMITS = MediaLimits()


def to_image(value: Any) -> Image:
    """An Image from an Image, encoded bytes, a path, or a PIL image."""
    if isinstance(value, Image):
        return value
    if isinstance(value, bytes | bytearray):
        return decode(bytes(value), LIMITS)
    if isinstance(value, str | Path):
        path = Path(value).expanduser()
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidImage(f"{path} can not be read: {error.strerror}") from error
        return decode(data, LIMITS)
    if hasattr(value, "convert") and hasattr(value, "size"):
        return from_pil(value)
    raise InvalidImage(f"{type(value).__name__} is no image; accepted: path, bytes, PIL image, fovea Image")


def to_prompt(prompt: Any, images: Sequence[Any] = (), budget: PixelBudget | None = None) -> Prompt:
    """A question with images in front, OpenAI-style messages, or a prompt that is one already."""
    if isinstance(prompt, ChatPrompt | TextPrompt | TokenPrompt):
        if images or budget is not None:
            what = "images" if images else "budget"
            raise InvalidRequest(f"{what} must be in the prompt itself when it is not plain text", param=what)
        return prompt
    budget = budget or PixelBudget()
    if isinstance(prompt, str):
        pictures = tuple(ImagePart(_at(index, image), budget) for index, image in enumerate(images))
        return ChatPrompt((Message("user", (*pictures, TextPart(prompt))),))
    if images:
        raise InvalidRequest("with messages, images are content parts of type image", param="images")
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidRequest("a prompt is text, messages (one at least), or a Prompt", param="messages")
    counter = iter(range(1 << 30))
    return ChatPrompt(tuple(_message(m, f"messages[{i}]", counter, budget) for i, m in enumerate(prompt)))


def _at(index: int, value: Any) -> Image:
    try:
        return to_image(value)
    except InvalidImage as error:
        raise error.at(index) from error


def _message(value: Any, where: str, counter: Any, budget: PixelBudget) -> Message:
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
    parts = [_part(part, f"{where}.content[{i}]", counter, budget) for i, part in enumerate(content)]
    return Message(role, tuple(parts))


def _part(value: Any, where: str, counter: Any, budget: PixelBudget) -> Part:
    if isinstance(value, TextPart | ImagePart):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise InvalidRequest("a part of type text needs text", param=f"{where}.text")
        return TextPart(value["text"])
    if kind == "image":
        if "image" not in value:
            raise InvalidRequest("a part of type image needs image", param=f"{where}.image")
        return ImagePart(_at(next(counter), value["image"]), budget)
    raise InvalidRequest(f"part of type {kind!r}; accepted: text, image", param=where)
