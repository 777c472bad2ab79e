"""Where workloads play: new pictures and texts, questions made of them, and the client that asks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fovea.bench.client import Client
from fovea.bench.content import Content
from fovea.bench.sample import Ask, Sample
from fovea.bench.settings import Shape

Message = Mapping[str, Any]


class Stage:
    """seen: told of every request that has ended."""

    def __init__(
        self, client: Client, shape: Shape, nonce: str, seen: Callable[[Sample], None] = lambda _: None
    ) -> None:
        self.client = client
        self.shape = shape
        self.content = Content(shape.seed, nonce, shape.token_side)
        self._seen = seen
        self._numbers = itertools.count()
        self._urls: dict[str, str] = {}

    async def picture(self, key: str | None = None, visual_tokens: int = 0) -> str:
        """The URL of a picture: of that name, or one that nobody has asked about. It is sent ahead where that is wanted."""
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

    def about(self, *urls: str, text_first: bool = False, max_tokens: int = 0) -> Ask:
        """A new question about pictures, or about none. The text stands behind them, unless `text_first`."""
        message = turn(self.content.text(self.shape.prompt_tokens), urls, text_first=text_first)
        return Ask((message,), max_tokens or self.shape.output_tokens, images=len(urls))

    def after(self, ask: Ask, answer: Sample) -> Ask:
        """The next question of a conversation."""
        said = {"role": "assistant", "content": "".join(answer.text)}
        message = turn(self.content.text(self.shape.prompt_tokens), ())
        return Ask((*ask.messages, said, message), ask.max_tokens, ask.label, ask.images)

    async def send(
        self, ask: Ask, due: float | None = None, heard: Callable[[Sample], bool] | None = None
    ) -> Sample:
        sample = await self.client.ask(ask, due, heard)
        self._seen(sample)
        return sample

    async def together(self, asks: Sequence[Ask]) -> list[Sample]:
        """All at once, due at one moment."""
        due = self.client.clock()
        return list(await asyncio.gather(*(self.send(ask, due) for ask in asks)))


def turn(text: str, urls: Sequence[str], *, text_first: bool = False) -> Message:
    """A message of the user."""
    if not urls:
        return {"role": "user", "content": text}
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = {"type": "text", "text": text}
    return {"role": "user", "content": [said, *shown] if text_first else [*shown, said]}
