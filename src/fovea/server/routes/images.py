"""/v1/images: send an image ahead, have it encoded, and name it by `fovea-image://ID` in later requests."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from fovea.api.schema import ImageUpload
from fovea.core.errors import InvalidRequest, NotFound
from fovea.core.image import PixelBudget
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Message
from fovea.media.bundle import ImageBundle
from fovea.media.image.store import SCHEME, StoredImage
from fovea.server.answer import Deadline, while_connected, whole
from fovea.server.docs import ERRORS, NAMED
from fovea.server.explain import shorten
from fovea.server.room import Room
from fovea.server.state import ServerState, share_of, state_of

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


def _found(state: ServerState, name: str, tenant: str) -> StoredImage:
    stored = state.images.get(name, tenant)
    if stored is None:
        raise NotFound(f"image {shorten(name)} is not stored here, or has expired", code="image_not_found")
    return stored


def _encoding(loaded: ImageBundle, body: ImageUpload, salt: str, timeout: float | None) -> GenerationRequest:
    budget = PixelBudget(detail=body.detail, min_pixels=body.min_pixels, max_pixels=body.max_pixels)
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=ChatPrompt((Message("user", (ImagePart(loaded.images[0], budget),)),)),
        cache_salt=salt,
        timeout=timeout,
        encode_only=True,
        fetch_s=loaded.wait.fetch_s,
        media_decode_s=loaded.wait.decode_s,
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
