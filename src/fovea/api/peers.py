"""Bodies of requests from one engine to another that works for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fovea.api.wire import Body, FreeJson, Integer, Number, Url, Wire

MOST_IMAGES = 4096
MOST_RELEASES = 65_536


class PeerImage(Wire):
    """An image of a prompt, with its visual plan as `engine.request.plans` writes it."""

    url: Url = Field(description="The image's file, as a data: URL.")
    plan: FreeJson


class PeerRelease(Body):
    """Offers of a peer whose values were fetched, as it sent them."""

    offers: list[FreeJson] = Field(max_length=MOST_RELEASES)


class PeerWork(Body):
    """A piece of work for a peer.

    kind: "encode": encode the images. "prefill": compute the keys and values of the prompt.
    layout, road: name what both engines must have in common.
    id: id of the request that it belongs to, for logs.
    salt: cache salt of that request.
    ids: token ids of the prompt; of "encode" there are none.
    first: tokens of the prompt whose keys and values the asking engine has.
    outputs: numbers of the images whose encoder outputs are wanted.
    timeout: seconds until nobody wants the result any more.
    client: (name of the key, name of the tenant) of the request.
    """

    kind: Literal["encode", "prefill"]
    layout: str = Field(max_length=128)
    road: str = Field(default="", max_length=2048)
    id: str = Field(max_length=256)
    salt: str = Field(default="", max_length=1024)
    ids: list[Integer] = Field(default_factory=list)
    images: list[PeerImage] = Field(default_factory=list, max_length=MOST_IMAGES)
    first: Integer | None = Field(default=None, ge=0)
    outputs: list[Integer] = Field(default_factory=list, max_length=MOST_IMAGES)
    timeout: Number | None = Field(default=None, gt=0, le=86_400)
    priority: Integer = Field(default=0, ge=-1000, le=1000)
    client: tuple[str, str] = ("", "")
