"""/v1/images: send an image ahead, have it encoded, and name it by `fovea-image://ID` in later requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from fovea.api.convert import image_references, video_references
from fovea.api.schema import ChatMessage, ImageUpload
from fovea.core.errors import InvalidImage, InvalidRequest, NotFound
from fovea.core.image import Image, PixelBudget
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Message
from fovea.media.image.store import SCHEME, StoredImage
from fovea.media.loaded import Loaded, MediaTimings, Opened
from fovea.server.answer import Deadline, while_connected, whole
from fovea.server.docs import ERRORS, NAMED
from fovea.server.explain import shorten
from fovea.server.room import Room
from fovea.server.state import ServerState, Share, share_of, state_of

router = APIRouter()


@router.post("/v1/images", responses=ERRORS)
async def upload(body: ImageUpload, http: Request) -> dict[str, Any]:
    """Fetch, decode and keep an image; encode it too, unless `encode` is false."""
    state = state_of(http)
    state.check_model(body.model)
    with state.rooms.hold(1 if body.encode else 0) as room:
        return await _upload(state, body, http, room)


async def _upload(state: ServerState, body: ImageUpload, http: Request, room: Room) -> dict[str, Any]:
    """`timeout` is one deadline for all of it."""
    share = share_of(http, body.cache_salt)
    deadline = Deadline(state.timeout(body.timeout))
    loading = state.media.load_timed([body.url], ["url"], share.salt)
    loaded = await while_connected(http, deadline.reading(loading))
    image = loaded.images[0]
    stored = state.images.put(image, share.salt, share.tenant)
    if stored is None:
        raise InvalidRequest(
            f"the image takes {len(image.rgb)} bytes decoded; images that are sent ahead have "
            f"{state.images.cache.capacity} in all (image_store_mib)",
            param="url",
            code="image_too_large",
        )
    card = _card(state, stored) | {"encoded": False}
    if body.encode:
        answer = await while_connected(
            http, whole(state, _encoding(loaded, body, share.salt, deadline.left), room)
        )
        card |= {"encoded": True, "visual_tokens": answer.usage.image}
    return card


@router.get("/v1/images/{name}", responses=NAMED)
async def describe(name: str, http: Request) -> dict[str, Any]:
    """Whether an image is still here, and until when."""
    state = state_of(http)
    return _card(state, _found(state, name, share_of(http, None).tenant))


@router.delete("/v1/images/{name}", responses=NAMED)
async def forget(name: str, http: Request) -> dict[str, Any]:
    """Forget an image. What caches hold of it goes in their own time."""
    state = state_of(http)
    _found(state, name, share_of(http, None).tenant)
    state.images.drop(name)
    return {"id": name, "object": "image.deleted", "deleted": True}


async def load_media(
    state: ServerState, messages: Sequence[ChatMessage], share: Share
) -> tuple[Loaded, Opened]:
    """The images and the videos of a conversation, read at the same time; the first that fails ends the others."""
    pictures, clips = image_references(messages), video_references(messages)

    async def read() -> Loaded:
        return await load_images(state, [r.url for r in pictures], [r.param for r in pictures], share)

    async def opened() -> Opened:
        return await state.media.open_videos([r.url for r in clips], [r.param for r in clips], share.salt)

    if not (pictures and clips):  # tasks would let others go first, for nothing
        return await read(), await opened()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(read()), group.create_task(opened())
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return tasks[0].result(), tasks[1].result()


async def load_images(state: ServerState, urls: Sequence[str], places: Sequence[str], share: Share) -> Loaded:
    """The images of one request, in order: those that were sent ahead by id, the others from their URLs."""
    known = {
        i: _named(state, url, places[i], share.tenant) for i, url in enumerate(urls) if url.startswith(SCHEME)
    }
    if known and len(urls) > state.media.limits.max_images:
        raise InvalidRequest(
            f"the request has {len(urls)} images; accepted: at most {state.media.limits.max_images}",
            param=places[state.media.limits.max_images],
            code="too_many_images",
        )
    others = [i for i in range(len(urls)) if i not in known]
    loaded = await state.media.load_timed([urls[i] for i in others], [places[i] for i in others], share.salt)
    rest = iter(zip(loaded.images, loaded.timings, strict=True))
    pairs = [(known[i], MediaTimings(0.0, 0.0)) if i in known else next(rest) for i in range(len(urls))]
    return Loaded(tuple(image for image, _ in pairs), tuple(timings for _, timings in pairs))


def _named(state: ServerState, url: str, place: str, tenant: str) -> Image:
    stored = state.images.get(url.removeprefix(SCHEME), tenant)
    if stored is None:
        raise InvalidImage(
            f"{shorten(url)} is not here, or not any more; send the image again to /v1/images",
            param=place,
            code="image_not_found",
        )
    return stored.image


def _found(state: ServerState, name: str, tenant: str) -> StoredImage:
    stored = state.images.get(name, tenant)
    if stored is None:
        raise NotFound(f"image {shorten(name)} is not here, or not any more", code="image_not_found")
    return stored


def _encoding(loaded: Loaded, body: ImageUpload, salt: str, timeout: float | None) -> GenerationRequest:
    budget = PixelBudget(detail=body.detail, min_pixels=body.min_pixels, max_pixels=body.max_pixels)
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=ChatPrompt((Message("user", (ImagePart(loaded.images[0], budget),)),)),
        cache_salt=salt,
        timeout=timeout,
        encode_only=True,
        fetch_s=loaded.waited.fetch_s,
        media_decode_s=loaded.waited.decode_s,
    )


def _card(state: ServerState, stored: StoredImage) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "image",
        "url": f"{SCHEME}{stored.id}",
        "width": stored.image.width,
        "height": stored.image.height,
        "bytes": len(stored.image.rgb),
        "expires_at": int(stored.expires),
        "model": state.client.info.name,
    }
