"""The media of one request, read at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fovea.api.content import ChatMessage
from fovea.core.errors import InvalidVideo
from fovea.media.limits import MediaLimits
from fovea.media.bundle import ImageBundle, VideoBundle
from fovea.server.media import load_media
from fovea.server.state import ServerState, Share

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
    """Images come when videos are asked for. broken: videos fail while images are still on their way."""

    limits = MediaLimits()

    def __init__(self, *, broken: bool = False) -> None:
        self.asked = asyncio.Event()
        self.broken = broken
        self.ended = False

    async def load_timed(self, urls: list[str], params: list[str], scope: str) -> ImageBundle:
        assert (urls, params) == (["https://example.com/a.png"], ["messages[0].content[0].image_url.url"])
        try:
            await self.asked.wait()
            await asyncio.sleep(3600 if self.broken else 0)
        finally:
            self.ended = True
        return ImageBundle((), ())

    async def open_videos(self, urls: list[str], params: list[str], scope: str) -> VideoBundle:
        assert (urls, params) == (["https://example.com/a.mp4"], ["messages[0].content[1].video_url.url"])
        self.asked.set()
        await asyncio.sleep(0)
        if self.broken:
            raise InvalidVideo("no video", index=0)
        return VideoBundle((), ())


async def load(media: Media) -> tuple[ImageBundle, VideoBundle]:
    state = cast("ServerState", SimpleNamespace(media=media, images=None))
    async with asyncio.timeout(10):
        return await load_media(state, MESSAGES, cast("Any", SimpleNamespace(salt="", tenant="")))


async def test_neither_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A video's download began when the last image was decoded."""
    monkeypatch.setattr("fovea.server.media.load_images", alone)
    assert await load(Media()) == (ImageBundle((), ()), VideoBundle((), ()))


async def test_the_first_that_fails_ends_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fovea.server.media.load_images", alone)
    media = Media(broken=True)
    with pytest.raises(InvalidVideo, match="no video"):
        await load(media)
    assert media.ended


async def alone(state: ServerState, urls: list[str], places: list[str], share: Share) -> ImageBundle:
    return await state.media.load_timed(urls, places, share.salt)
