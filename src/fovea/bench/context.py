"""The context in which workloads run: it creates new pictures and texts, builds requests, and sends them.

Equal seeds and nonces give equal contents. Contents of another nonce are new to every cache.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from fovea.bench.client import Client
from fovea.bench.measure import BenchRequest, Sample
from fovea.bench.settings import Shape

GRAIN = 16
"""Pixels between two random colours.

The noise is smooth enough that the JPEG is about as large as a photograph's.
"""
QUALITY = 90
WORDS = [
    "the", "a", "one", "this", "that", "which", "small", "large", "red", "green", "blue", "left",
    "right", "top", "first", "last", "near", "far", "old", "new", "round", "long", "picture", "line",
    "box", "house", "tree", "water", "light", "road", "hand", "table", "door", "name", "part", "place",
    "side", "colour", "number", "letter", "page", "is", "has", "shows", "holds", "says", "looks",
    "stands", "lies", "above", "below", "behind", "before", "and", "or", "but", "with", "without", "for",
    "from", "into",
]  # fmt: skip
MARK_WORDS = 8
"""Approximate number of tokens of the marker with which every text begins."""


def picture(seed: str, visual_tokens: int, token_side: int) -> bytes:
    """A JPEG of coloured noise that becomes about `visual_tokens` visual tokens.

    seed: equal seeds give equal bytes. token_side: side of the square of pixels that becomes one token.
    """
    rows = max(1, math.isqrt(visual_tokens))
    width, height = max(1, round(visual_tokens / rows)) * token_side, rows * token_side
    digest = hashlib.sha256(seed.encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:16]))
    shape = (height // GRAIN + 2, width // GRAIN + 2, 3)
    coarse = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BILINEAR).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


class Content:
    """A generator of pictures and texts.

    seed, nonce: together they determine every picture and text.
    token_side: side of a visual token in pixels.
    """

    def __init__(self, seed: int, nonce: str, token_side: int) -> None:
        self._seed = f"{seed} {nonce}"
        self._nonce = nonce
        self._token_side = token_side
        self._texts = 0

    def picture_url(self, key: str, visual_tokens: int) -> str:
        """The picture with this name, as a data URL. Equal keys give equal pictures."""
        data = picture(f"{self._seed} {key}", visual_tokens, self._token_side)
        return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"

    def text(self, tokens: int) -> str:
        """A new text of about `tokens` tokens.

        Its first words are unique, so no prefix cache holds any of it.
        """
        self._texts += 1
        return self._words(f"{self._texts}.{self._nonce}", tokens)

    def system(self, tokens: int) -> str:
        """A system prompt of about `tokens` tokens. A shorter one is a prefix of a longer one."""
        return self._words(f"system.{self._nonce}", tokens)

    def _words(self, mark: str, tokens: int) -> str:
        random = Random(f"{self._seed} {mark}")
        return " ".join([f"{mark}:", *random.choices(WORDS, k=max(1, tokens - MARK_WORDS))])


Message = Mapping[str, Any]


class WorkloadContext:
    """The contents and the client of one workload.

    client: sends the requests.
    shape: sizes of images, prompts and answers.
    nonce: two contexts with different nonces share no text and no picture.
    on_sample: called for every request that has ended.
    """

    def __init__(
        self, client: Client, shape: Shape, nonce: str, on_sample: Callable[[Sample], None] = lambda _: None
    ) -> None:
        self.client = client
        self.shape = shape
        self.content = Content(shape.seed, nonce, shape.token_side)
        self._on_sample = on_sample
        self._numbers = itertools.count()
        self._urls: dict[str, str] = {}

    async def picture(self, key: str | None = None, visual_tokens: int = 0) -> str:
        """Return the URL of a picture, which is uploaded to the server first where the target says so.

        key: name of the picture; equal keys and sizes give the same URL. None: a new picture that no request
            used.
        visual_tokens: size of the picture; 0: the next one of the shape's sizes.
        """
        number = next(self._numbers) if key is None else 0
        name = f"new {number}" if key is None else f"key {key} {visual_tokens}"
        if name not in self._urls:
            size = visual_tokens or self.shape.visual_tokens[number % len(self.shape.visual_tokens)]
            url = await asyncio.to_thread(self.content.picture_url, name, size)
            if self.client.target.images_as != "data":
                url = await self.client.send_image(url)
            if key is None:
                return url
            self._urls[name] = url
        return self._urls[name]

    def about(self, *urls: str, text_first: bool = False, max_tokens: int = 0) -> BenchRequest:
        """Build a new question about pictures, or about none.

        The text follows the pictures unless `text_first`.

        max_tokens: length of the answer; 0: the shape's.
        """
        message = user_message(self.content.text(self.shape.prompt_tokens), urls, text_first=text_first)
        return BenchRequest((message,), max_tokens or self.shape.output_tokens, images=len(urls))

    def after(self, request: BenchRequest, answer: Sample) -> BenchRequest:
        """Build the next question of a conversation from the last request and its answer."""
        reply = {"role": "assistant", "content": "".join(answer.text_pieces)}
        message = user_message(self.content.text(self.shape.prompt_tokens), ())
        messages = (*request.messages, reply, message)
        return BenchRequest(messages, request.max_tokens, request.label, request.images)

    async def send(
        self,
        request: BenchRequest,
        due: float | None = None,
        on_progress: Callable[[Sample], bool] | None = None,
    ) -> Sample:
        """Send one request and report its sample to `on_sample`. Arguments as in `Client.send`."""
        sample = await self.client.send(request, due, on_progress)
        self._on_sample(sample)
        return sample

    async def together(self, requests: Sequence[BenchRequest]) -> list[Sample]:
        """Send all requests concurrently, all due at the same moment."""
        due = self.client.clock()
        return list(await asyncio.gather(*(self.send(request, due) for request in requests)))


def user_message(text: str, urls: Sequence[str], *, text_first: bool = False) -> Message:
    """A message of the user: text and any number of images, given by URL."""
    if not urls:
        return {"role": "user", "content": text}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text_part = {"type": "text", "text": text}
    return {"role": "user", "content": [text_part, *images] if text_first else [*images, text_part]}
