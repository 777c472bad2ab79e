"""Loading of the images and the videos of one request, both at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fovea.api.content import ChatMessage
from fovea.core.errors import InvalidVideo
from fovea.media.limits import MediaLimits
from fovea.media.load import ImageBundle, VideoBundle
from fovea.server.clients import Caller
from fovea.server.media import load_media
from fovea.server.request import CacheScope, Request

MESSAGES = [
    ChatMessage.model_validate(
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
            ],
        }
    )
]


class Media:
    """A media loader whose images arrive only after its videos were requested.

    broken: whether the videos fail while the images are still loading.
    ended: whether the loading of images ended, with or without success.
    """

    limits = MediaLimits()

    def __init__(self, *, broken: bool = False) -> None:
        self.videos_requested = asyncio.Event()
        self.broken = broken
        self.ended = False

    async def load_timed(self, urls: list[str], params: list[str], scope: str, owner: str) -> ImageBundle:
        assert (urls, params) == (["https://example.com/a.png"], ["messages[0].content[0].image_url.url"])
        try:
            await self.videos_requested.wait()
            await asyncio.sleep(3600 if self.broken else 0)
        finally:
            self.ended = True
        return ImageBundle((), ())

    async def open_videos(self, urls: list[str], params: list[str], scope: str, owner: str) -> VideoBundle:
        assert (urls, params) == (["https://example.com/a.mp4"], ["messages[0].content[1].video_url.url"])
        self.videos_requested.set()
        await asyncio.sleep(0)
        if self.broken:
            raise InvalidVideo("no video", index=0)
        return VideoBundle((), ())


async def load(media: Media) -> tuple[ImageBundle, VideoBundle]:
    info = SimpleNamespace(check_media=lambda kind, param: None)
    state = SimpleNamespace(media=media, image_store=None, engine=SimpleNamespace(info=info))
    timeline = SimpleNamespace(loading=None)
    request = cast("Request", SimpleNamespace(state=state, caller=Caller(), timeline=timeline))
    async with asyncio.timeout(10):
        return await load_media(request, MESSAGES, cast("Any", SimpleNamespace(salt="", tenant="")))


async def test_images_and_videos_load_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the past, the download of videos began only after the last image was decoded."""
    monkeypatch.setattr("fovea.server.media.load_images", load_without_store)
    assert await load(Media()) == (ImageBundle((), ()), VideoBundle((), ()))


async def test_first_failure_cancels_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.server.media.load_images", load_without_store)
    media = Media(broken=True)
    with pytest.raises(InvalidVideo, match="no video"):
        await load(media)
    assert media.ended


async def load_without_store(
    request: Request, urls: list[str], params: list[str], scope: CacheScope
) -> ImageBundle:
    return await request.state.media.load_timed(urls, params, scope.salt, "")
