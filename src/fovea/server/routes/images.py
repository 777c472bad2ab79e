"""/v1/images: storing and encoding an image that later requests name by the URL `fovea-image://ID`."""

from __future__ import annotations

import uuid
from typing import Any

from fovea.api.explain import shorten
from fovea.api.schema import ImageUpload
from fovea.core.errors import InvalidImage, InvalidRequest, NotFound
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Message
from fovea.media.cache import SCHEME, StoredImage
from fovea.media.load import ImageBundle
from fovea.server.generation import Generation
from fovea.server.request import Request
from fovea.server.routing import Routes
from fovea.server.state import ServerState

routes = Routes()


@routes.post("/v1/images", bodies=(ImageUpload,))
async def upload(request: Request, body: ImageUpload) -> dict[str, Any]:
    """Store an image for later requests.

    It is fetched and decoded now, and encoded unless `encode` is false. One that cannot be decoded is not
    stored.
    """
    state = request.state
    state.check_model(body.model)
    state.engine.info.check_media("image", "url")
    request.reserve(1, priority=0)
    scope = request.cache_scope(body.cache_salt)
    deadline = request.deadline(body.timeout)  # one for all of these steps
    bundle = await deadline.limit(
        state.media.load_timed([body.url], ["url"], scope.salt, request.caller.owner)
    )
    image = bundle.images[0]
    stored = state.image_store.put(image, scope.salt, scope.tenant)
    if stored is None:
        raise InvalidRequest(
            f"the image takes {image.held_bytes} bytes; the store for images has "
            f"{state.image_store.cache.capacity} in all (image_store_mib), or less for one client",
            param="url",
            code="image_too_large",
        )
    card = _image_object(state, stored) | {"encoded": False}
    try:
        if not body.encode:
            await deadline.limit(state.media.decode(image))
            return card
        asked = _encode_request(bundle, body, scope.salt, deadline.remaining)
        answer = await Generation(request, asked).answer()
    except InvalidImage as error:
        state.image_store.drop(stored.id)
        raise error.at(0, "url") from error
    finally:
        state.media.budget.release(image.pixels)  # from now on, only the store counts it
    return card | {"encoded": True, "visual_tokens": answer.usage.image}


@routes.get("/v1/images/{name}")
async def describe(request: Request, name: str) -> dict[str, Any]:
    """Describe a stored image, with the time at which it expires."""
    state = request.state
    return _image_object(state, _stored_image(state, name, request.cache_scope().tenant))


@routes.delete("/v1/images/{name}")
async def forget(request: Request, name: str) -> dict[str, Any]:
    """Delete a stored image. Caches evict their entries about it later, on their own."""
    state = request.state
    _stored_image(state, name, request.cache_scope().tenant)
    state.image_store.drop(name)
    return {"id": name, "object": "image.deleted", "deleted": True}


def _stored_image(state: ServerState, name: str, tenant: str) -> StoredImage:
    stored = state.image_store.get(name, tenant)
    if stored is None:
        raise NotFound(f"image {shorten(name)} is not stored here, or has expired", code="image_not_found")
    return stored


def _encode_request(
    bundle: ImageBundle, body: ImageUpload, salt: str, timeout: float | None
) -> GenerationRequest:
    budget = PixelBudget(detail=body.detail, min_pixels=body.min_pixels, max_pixels=body.max_pixels)
    return GenerationRequest(
        id=uuid.uuid4().hex,
        prompt=ChatPrompt((Message("user", (ImagePart(bundle.images[0], budget),)),)),
        cache_salt=salt,
        timeout=timeout,
        encode_only=True,
        fetch_s=bundle.wait.fetch_s,
        media_decode_s=bundle.wait.decode_s,
    )


def _image_object(state: ServerState, stored: StoredImage) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "image",
        "url": f"{SCHEME}{stored.id}",
        "width": stored.image.width,
        "height": stored.image.height,
        "bytes": stored.image.rgb_bytes,
        "expires_at": int(stored.expires),
        "model": state.engine.info.name,
    }
