"""The load and the media host: seeded orders, and files that have to be refused."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from tests.chaos.client import send
from tests.chaos.items import Item
from tests.chaos.media_host import BOMB_SIDE, MediaHost, bomb
from tests.chaos.orders import KINDS, MEDIA, Orders, secret

ITEMS = [
    Item("text", "Hello."),
    *(Item(f"image-{number}", "How many?", (b"file %d" % number,)) for number in range(9)),
    Item("pair", "Are both equal?", (b"file 1", b"file 2")),
    Item("schema", "Describe it.", (b"file 3",), {"type": "object"}),
]


def test_equal_seeds_give_equal_orders_and_markers_are_unique() -> None:
    one, two = (Orders(1, ITEMS, "http://media") for _ in range(2))
    orders = [one.order("a", number) for number in range(400)]
    assert orders == [two.order("a", number) for number in range(400)]
    assert orders != [Orders(2, ITEMS, "http://media").order("a", number) for number in range(400)]
    others = [one.order("b", number) for number in range(400)]
    assert len({order.marker for order in orders + others}) == 800
    assert {order.kind for order in orders} == {*KINDS, "media"}


def test_bodies_are_those_of_their_api() -> None:
    orders = Orders(1, ITEMS, "http://media")
    for number in range(200):
        order = orders.order("a", number, media=number % 2 == 0)
        body = json.loads(order.body())
        assert body["temperature"] == 0
        assert ("input" in body) == (order.api == "responses")
        assert bool(body.get("stream")) == order.stream
        assert (secret(order.marker) in order.body().decode()) == bool(order.url)
        if order.media:
            assert f"/{order.media}/" in order.url
            assert ("video_url" in order.body().decode()) == (order.media == "endless-video")
    assert {orders.order("a", number, media=True).media for number in range(400)} == {*MEDIA, ""}


def test_without_a_media_host_no_order_has_a_url() -> None:
    orders = Orders(1, ITEMS, "")
    assert not any(orders.order("a", number, media=True).url for number in range(200))


async def test_the_media_host_serves_pictures_and_faults() -> None:
    host = MediaHost([ITEMS[1]])
    port = await host.start("127.0.0.1", 0, 0)
    try:
        statuses = {
            kind: await send(port, "GET", f"/{kind}/0.png?token=x", {}, b"", 10.0)
            for kind in ("picture", "expired", "truncated", "wrong-type", "redirect", "reset", "missing")
        }
    finally:
        await host.stop()
    assert statuses["picture"].body == b"file 0"
    assert {kind: (came.status, came.ending) for kind, came in statuses.items() if kind != "picture"} == {
        "expired": (403, "complete"), "truncated": (200, "cut"), "wrong-type": (200, "complete"),
        "redirect": (302, "complete"), "reset": (200, "cut"), "missing": (404, "complete"),
    }  # fmt: skip
    assert statuses["redirect"].headers["location"].startswith("http://127.0.0.1:")
    assert host.canary == 0


def test_a_bomb_is_small_and_states_many_pixels() -> None:
    data = bomb(BOMB_SIDE)
    assert len(data) < 10_000
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
