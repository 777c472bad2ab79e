"""Loading of the images and videos that a request names, for every route that accepts them.

A reference is either a URL, which `fovea.media` fetches and decodes, or `fovea-image://ID`, the name of an
image that the client uploaded to /v1/images before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fovea.api.content import ChatMessage
from fovea.api.convert import image_references, video_references
from fovea.api.explain import shorten
from fovea.core.errors import InvalidImage, InvalidRequest
from fovea.core.media import UNREAD, Image, Payload
from fovea.media.cache import SCHEME, StoredImage
from fovea.media.load import ImageBundle, MediaTimings, VideoBundle
from fovea.server.request import CacheScope, Request


async def load_media(
    request: Request, messages: Sequence[ChatMessage], scope: CacheScope, *, headers_only: bool = False
) -> tuple[ImageBundle, VideoBundle]:
    """Load the images and the videos of a conversation concurrently. The first failure cancels the rest.

    headers_only: whether images have no pixels.
    Raises InvalidRequest before anything is fetched if the model takes text alone, and the errors of
    `load_images` and of `MediaLoader.open_videos`.
    """
    images, videos = image_references(messages), video_references(messages)
    for kind, references in (("image", images), ("video", videos)):
        if references:
            request.state.engine.info.check_media(kind, references[0].param)
    if images or videos:
        request.timeline.loading = time.perf_counter()

    async def read_images() -> ImageBundle:
        load = load_headers if headers_only else load_images
        return await load(request, [r.url for r in images], [r.param for r in images], scope)

    async def open_videos() -> VideoBundle:
        params = [r.param for r in videos]
        urls, owner = [r.url for r in videos], request.caller.owner
        return await request.state.media.open_videos(urls, params, scope.salt, owner)

    if not (images and videos):  # a task would let other tasks of the event loop run first, for no gain
        return await read_images(), await open_videos()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(read_images()), group.create_task(open_videos())
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return tasks[0].result(), tasks[1].result()


@contextmanager
def image_paths(messages: Sequence[ChatMessage]) -> Iterator[None]:
    """Name the JSON path of the image in errors of the block that name an image by its number.

    The engine decodes images, and does not know where in the request they are.
    """
    try:
        yield
    except InvalidImage as error:
        references = image_references(messages)
        if error.param is None and error.index is not None and error.index < len(references):
            error.param = references[error.index].param
        raise


async def load_images(
    request: Request, urls: Sequence[str | Payload], params: Sequence[str], scope: CacheScope
) -> ImageBundle:
    """Load the images of one request, in order: uploaded ones from the store, the others from their URLs.

    params: the JSON path of each URL in the request, for errors.
    Raises InvalidImage for an uploaded image that is not in the store, InvalidRequest for too many images,
    and the errors of `MediaLoader.load_timed`.
    """
    media, owner = request.state.media, request.caller.owner

    async def load(others: Sequence[str | Payload], names: Sequence[str]) -> ImageBundle:
        return await media.load_timed(others, names, scope.salt, owner)

    return await _with_uploaded(
        request, urls, params, scope, load, lambda stored: media.lend(stored.image, owner)
    )


async def load_headers(
    request: Request, urls: Sequence[str | Payload], params: Sequence[str], scope: CacheScope
) -> ImageBundle:
    """Load the images of one request without pixels, in order. Arguments and errors as in `load_images`."""
    media = request.state.media

    async def load(others: Sequence[str | Payload], names: Sequence[str]) -> ImageBundle:
        return await media.load_headers(others, names, scope.salt)

    return await _with_uploaded(
        request, urls, params, scope, load, lambda stored: replace(stored.image, pixels=UNREAD)
    )


async def _with_uploaded(
    request: Request,
    urls: Sequence[str | Payload],
    params: Sequence[str],
    scope: CacheScope,
    load: Callable[[Sequence[str | Payload], Sequence[str]], Awaitable[ImageBundle]],
    lend: Callable[[StoredImage], Image],
) -> ImageBundle:
    """Put uploaded images and loaded ones in order.

    load: loads images from their URLs. lend: makes an image of the request out of an uploaded one.
    """
    uploaded = {
        i: lend(_stored_image(request, url, params[i], scope.tenant))
        for i, url in enumerate(urls)
        if isinstance(url, str) and url.startswith(SCHEME)
    }
    if not uploaded:
        return await load(urls, params)
    media = request.state.media
    limit = media.limits.max_images
    if len(urls) > limit:
        raise InvalidRequest(
            f"the request has {len(urls)} images; accepted: at most {limit}",
            param=params[limit],
            code="too_many_images",
        )
    others = [i for i in range(len(urls)) if i not in uploaded]
    loaded = await load([urls[i] for i in others], [params[i] for i in others])
    rest = iter(zip(loaded.images, loaded.timings, strict=True))
    pairs = [(uploaded[i], MediaTimings(0.0, 0.0)) if i in uploaded else next(rest) for i in range(len(urls))]
    images = tuple(image for image, _ in pairs)
    media.check_pixels(images)
    return ImageBundle(images, tuple(timings for _, timings in pairs))


def _stored_image(request: Request, url: str, param: str, tenant: str) -> StoredImage:
    stored = request.state.image_store.get(url.removeprefix(SCHEME), tenant)
    if stored is None:
        raise InvalidImage(
            f"{shorten(url)} is not stored here, or has expired; send the image again to /v1/images",
            param=param,
            code="image_not_found",
        )
    return stored
