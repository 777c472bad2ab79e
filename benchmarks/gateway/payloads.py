"""Bodies of chat requests: text of 1 KB, and pictures of random noise, which no compression makes smaller."""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

MODEL = "simulated"
DISTINCT = 16
"""Different bodies of each kind, sent in turn."""
NOISE_JPEG_QUALITY = 90


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    title: name in tables.
    size: bytes of the body, to within 2%.
    image: whether the body is mostly a picture; else it is text.
    events: events of the stream that it asks for; 0: a complete answer.
    gap_ms: pause of the backend between two events in milliseconds.
    connections: connections of the closed loop, each with one request at a time.
    rate: requests per second of the open loop.
    """

    title: str
    size: int
    image: bool = False
    events: int = 0
    gap_ms: float = 0.0
    connections: int = 8
    rate: float = 100.0


KINDS = {
    "text": Kind("1 KB text", 1_000, connections=32, rate=200.0),
    "image": Kind("220 KB image", 220_000, image=True, connections=16, rate=100.0),
    "photo": Kind("1.4 MB image", 1_400_000, image=True, rate=40.0),
    "burst": Kind("100 events at once", 1_000, events=100, connections=16, rate=40.0),
    "stream": Kind("100 events, 2 ms apart", 1_000, events=100, gap_ms=2.0, connections=32, rate=40.0),
}


def picture(size: int, seed: int) -> str:
    """A data URL of about `size` characters: noise as PNG if the seed is even, as JPEG if it is odd."""
    file_bytes = size * 3 // 4
    if seed % 2 == 0:
        return _data_url(_noise(round((file_bytes / 3) ** 0.5), seed, "PNG"), "png")
    side = round((file_bytes / 1.5) ** 0.5)
    file = _noise(side, seed, "JPEG")  # tells how many bytes a pixel of such noise takes
    return _data_url(_noise(round(side * (file_bytes / len(file)) ** 0.5), seed, "JPEG"), "jpeg")


def _noise(side: int, seed: int, form: str) -> bytes:
    image = Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(side * side * 3))
    file = io.BytesIO()
    image.save(file, form, **({"quality": NOISE_JPEG_QUALITY} if form == "JPEG" else {"compress_level": 1}))
    return file.getvalue()


def _data_url(file: bytes, form: str) -> str:
    return f"data:image/{form};base64,{base64.b64encode(file).decode()}"


def body(kind: Kind, seed: int) -> bytes:
    """A JSON body. The seed decides on its content; equal seeds give equal bytes."""
    words = f"Question {seed}: what is the most unusual thing in this picture, and why?"
    content: Any = words
    if kind.image:
        url = {"url": picture(kind.size - 300, seed)}
        content = [{"type": "text", "text": words}, {"type": "image_url", "image_url": url}]
    request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    if kind.events:
        request |= {"stream": True, "max_tokens": kind.events}
    missing = kind.size - len(json.dumps(request))
    if not kind.image and missing > 0:
        noise = random.Random(seed)
        filler = "".join(noise.choice("abcdefghijklmnop ") for _ in range(missing - 1))
        request["messages"][0]["content"] = f"{words} {filler}"
    return json.dumps(request).encode()


def bodies(kind: Kind, count: int = DISTINCT) -> list[bytes]:
    """Different bodies of one kind, PNG and JPEG in turn."""
    return [body(kind, seed) for seed in range(count)]
