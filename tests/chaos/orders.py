"""The mixed load: which request a client sends next. A pure function of the seed, the client and a number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from tests.chaos.items import Item, chat_body, data_url, messages_body, responses_body

Api = Literal["chat", "messages", "responses"]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
KINDS = {
    "text": 14, "image": 26, "two images": 8, "follow-up": 14, "messages": 8, "responses": 8, "schema": 8,
    "url": 8, "cancel": 6,
}  # fmt: skip
"""Kinds of requests with their weights."""
MEDIA = (
    "slow", "expired", "oversized", "truncated", "bomb", "wrong-type", "redirect", "endless-video", "no-tls",
    "reset", "missing",
)  # fmt: skip
"""Faults of the media host. A request with one of them has to be refused."""
MEDIA_RATE = 0.04
"""Share of requests with a fault of the media host outside of the episodes that inject these."""


@dataclass(frozen=True, slots=True)
class Order:
    """One request.

    marker: its id, which occurs in no other request. client: name of the tenant.
    item: its question; None: it asks for a file that has to be refused.
    media: the media host's fault; empty: none.
    url: the URL of a file at the media host; empty: its images are in the body.
    cancel_after_s: the client leaves after so many seconds; 0: it stays.
    cache: header cache-control; empty: none.
    """

    marker: str
    client: str
    kind: str
    api: Api
    stream: bool
    item: Item
    media: str = ""
    url: str = ""
    cancel_after_s: float = 0.0
    cache: str = ""

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self) -> bytes:
        """Return the request's body."""
        value: dict[str, Any]
        if self.media == "endless-video":
            value = chat_body(self.item, (), stream=self.stream)
            video = {"type": "video_url", "video_url": {"url": self.url}}
            value["messages"][0]["content"].insert(0, video)
        elif self.api == "messages":
            value = messages_body(self.item, stream=self.stream)
        elif self.api == "responses":
            value = responses_body(self.item, stream=self.stream)
        else:
            urls = [self.url] if self.url else [data_url(file) for file in self.item.images]
            value = chat_body(self.item, urls, stream=self.stream)
            value["request_id"] = self.marker
        return json.dumps(value).encode()


class Orders:
    """Makes the orders of all clients.

    media_host: beginning of the media host's URLs; empty: there is none, and no order has a URL.
    """

    def __init__(self, seed: int, items: Sequence[Item], media_host: str) -> None:
        self._seed, self._media_host = seed, media_host
        self._texts = [item for item in items if not item.images]
        self._single = [item for item in items if len(item.images) == 1 and item.schema is None]
        self._several = [item for item in items if len(item.images) > 1]
        self._schemas = [item for item in items if item.schema is not None]
        self._hosted = self._single[:6]

    @property
    def hosted(self) -> Sequence[Item]:
        """The questions whose picture the media host serves, in the order of its numbers."""
        return self._hosted

    def order(self, client: str, number: int, *, media: bool = False) -> Order:
        """Return the order of a client with a number. media: half of the orders have a fault of the host."""
        rng = Random(f"{self._seed}/{client}/{number}")
        marker = f"chaos-{client}-{number:06d}-{rng.getrandbits(32):08x}"
        if self._media_host and rng.random() < (0.5 if media else MEDIA_RATE):
            return self._faulty_media(rng, marker, client)
        kinds = {kind: weight for kind, weight in KINDS.items() if kind != "url" or self._media_host}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        stream = rng.random() < 0.5
        cache = rng.choices(("", "no-cache", "no-store"), (3, 2, 5))[0]
        cancel = rng.uniform(0.01, 0.8) if kind == "cancel" else 0.0
        api: Api = kind if kind in ("messages", "responses") else "chat"  # type: ignore[assignment]
        item, url = self._item(rng, kind), ""
        if kind == "url":
            place = self._hosted.index(item)
            url = f"{self._media_host}/picture/{place}.png?token={secret(marker)}"
        return Order(marker, client, kind, api, stream, item, "", url, cancel, cache)

    def _item(self, rng: Random, kind: str) -> Item:
        match kind:
            case "text":
                return rng.choice(self._texts)
            case "two images":
                return rng.choice(self._several or self._single)
            case "schema":
                return rng.choice(self._schemas or self._single)
            case "url":
                return rng.choice(self._hosted)
            case "follow-up":  # few pictures, so that several requests share one at a time
                return rng.choice(self._single[-8:])
            case "messages" | "responses":
                return rng.choice(self._single + self._texts)
            case _:
                return rng.choice(self._single)

    def _faulty_media(self, rng: Random, marker: str, client: str) -> Order:
        media = rng.choice(MEDIA)
        host = (
            self._media_host.replace("http://", "https://") + ":443"
            if media == "no-tls"
            else self._media_host
        )
        url = f"{host}/{media}/{rng.getrandbits(48):012x}.png?token={secret(marker)}"
        item = Item("media", "What do you see?")
        return Order(marker, client, "media", "chat", rng.random() < 0.5, item, media, url, 0.0, "no-store")


def secret(marker: str) -> str:
    """Return a token that may occur in no answer and in no log."""
    return "sesame" + format(Random(f"token/{marker}").getrandbits(64), "016x")
