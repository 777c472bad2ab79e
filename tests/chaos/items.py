"""The questions of a chaos day: generated pictures with known contents, and texts.

What the undisturbed engine answers is recorded before the load (`recording.py`); every other answer counts
as wrong, whatever the right one is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from fovea.evaluation.scenes import HELD_OUT_SEED, generate

KINDS = (
    "reading",
    "colour",
    "counting",
    "position",
    "reading",
    "listing",
    "compare",
    "json",
    "reading",
    "describe",
)
"""Kinds of scenes, in turn. Texts to read differ most from each other: they show best whose an answer is."""
SIZES = ((160, 160), (224, 160), (224, 224), (288, 224))
TEXTS = (
    "Hello.", "What is two and one?", "What can you do?", "Who are you?", "Name a colour.", "Is snow white?",
    "Tell me about circles.", "What is a star?", "Thank you.", "Can you see pictures?",
)  # fmt: skip
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its pictures.

    images: PNG files. schema: JSON Schema of the answer; None: any text.
    """

    name: str
    question: str
    images: tuple[bytes, ...] = ()
    schema: Mapping[str, Any] | None = None


def items(seed: int, count: int) -> list[Item]:
    """Return questions about `count` scenes and the texts; several questions may be about one picture."""
    found = [Item(f"text-{number}", text) for number, text in enumerate(TEXTS)]
    for sample in generate(HELD_OUT_SEED + seed, count, KINDS, SIZES):
        files = tuple(png(image) for image in sample.images)
        for number, turn in enumerate(sample.turns):
            if turn.role == "user":
                found.append(Item(f"{sample.id}-{number}", turn.question, files, turn.schema))
    return found


def png(image: Image.Image) -> bytes:
    """Return a picture as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def chat_body(item: Item, urls: Sequence[str], *, stream: bool) -> dict[str, Any]:
    """Return the body of /v1/chat/completions. urls: of the images, in order."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body: dict[str, Any] = {
        "model": "fovea-tiny", "temperature": 0, "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": item.question}]}],
    }  # fmt: skip
    if item.schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": item.schema},
        }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def messages_body(item: Item, *, stream: bool) -> dict[str, Any]:
    """Return the body of /v1/messages."""
    parts: list[dict[str, Any]] = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _base64(file)}}
        for file in item.images
    ]
    return {
        "model": "fovea-tiny", "temperature": 0, "max_tokens": MAX_TOKENS, "stream": stream,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": item.question}]}],
    }  # fmt: skip


def responses_body(item: Item, *, stream: bool) -> dict[str, Any]:
    """Return the body of /v1/responses."""
    parts: list[dict[str, Any]] = [
        {"type": "input_image", "image_url": data_url(file)} for file in item.images
    ]
    body: dict[str, Any] = {
        "model": "fovea-tiny", "temperature": 0, "max_output_tokens": MAX_TOKENS, "stream": stream,
        "store": False,
        "input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": item.question}]}],
    }  # fmt: skip
    if item.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": item.schema}}
    return body


def data_url(file: bytes) -> str:
    """Return a PNG file as a data URL."""
    return f"data:image/png;base64,{_base64(file)}"


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()
