"""/v1/images: storing and encoding an image that later requests name by the URL `fovea-image://ID`."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from fovea.api.explain import shorten
from fovea.api.schema import ImageUpload
from fovea.core.errors import InvalidImage, InvalidRequest, NotFound
from fovea.core.image import PixelBudget
from fovea.core.types import ChatPrompt, GenerationRequest, ImagePart, Message
from fovea.media.bundle import ImageBundle
from fovea.media.image.store import SCHEME, StoredImage
from fovea.server.answer import Deadline, collect_answer, while_connected
from fovea.server.bodies.route import BodyRoute
from fovea.server.docs import ERRORS, NAMED
from fovea.server.reservations import Reservation
from fovea.server.state import ServerState, cache_scope_of, state_of

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/images", responses=ERRORS)
async def upload(body: ImageUpload, http: Request) -> dict[str, Any]:
    """Store an image for later requests.

    It is fetched and decoded now, and encoded unless `encode` is false.
    """
    state = state_of(http)
    state.check_model(body.model)
    with state.reservations.reserve(1) as reservation:
        return await _upload(state, body, http, reservation)


async def _upload(
    state: ServerState, body: ImageUpload, http: Request, reservation: Reservation
) -> dict[str, Any]:
    """Load, store and encode the image. The timeout is one deadline for all of these steps.

    An image that cannot be decoded is not stored.
    """
    scope = cache_scope_of(http, body.cache_salt)
    deadline = Deadline(state.timeout(body.timeout))
    loading = state.media.load_timed([body.url], ["url"], scope.salt, state.caller.owner)
    bundle = await while_connected(http, deadline.limit_loading(loading))
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
            await while_connected(http, deadline.limit_loading(state.media.decode(image)))
            return card
        request = _encode_request(bundle, body, scope.salt, deadline.remaining)
        answer = await while_connected(http, collect_answer(state, request, reservation))
    except InvalidImage as error:
        state.image_store.drop(stored.id)
        raise error.at(0, "url") from error
    finally:
        state.media.budget.release(image.pixels)  # from now on, only the store counts it
    return card | {"encoded": True, "visual_tokens": answer.usage.image}


@router.get("/v1/images/{name}", responses=NAMED)
async def describe(name: str, http: Request) -> dict[str, Any]:
    """Describe a stored image, with the time at which it expires."""
    state = state_of(http)
    return _image_object(state, _stored_image(state, name, cache_scope_of(http, None).tenant))


@router.delete("/v1/images/{name}", responses=NAMED)
async def forget(name: str, http: Request) -> dict[str, Any]:
    """Delete a stored image. Caches evict their entries about it later, on their own."""
    state = state_of(http)
    _stored_image(state, name, cache_scope_of(http, None).tenant)
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
        "model": state.client.info.name,
    }
