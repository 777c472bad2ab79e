"""What an image is: bytes of the right count, and one name for one content."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.core.image import Image, VisualTokens, content_identity


def test_pixels_must_be_as_many_as_the_dimensions_say() -> None:
    assert Image("x", 2, 3, bytes(18)).rgb == bytes(18)
    with pytest.raises(ValueError, match="17 bytes, 2x3x3 needed"):
        Image("x", 2, 3, bytes(17))


def test_equal_identity_is_equal_image() -> None:
    assert Image("x", 1, 1, b"abc") == Image("x", 1, 1, b"xyz")
    assert Image("x", 1, 1, b"abc") != Image("y", 1, 1, b"abc")
    assert "abc" not in repr(Image("x", 1, 1, b"abc"))


def test_identity_depends_on_every_part_and_parts_can_not_run_into_each_other() -> None:
    names = {
        content_identity("image/png", 1, 23, b"data"),
        content_identity("image/png", 12, 3, b"data"),
        content_identity("image/pn", 1, 23, b"gdata"),
        content_identity("image/png", 1, 23, b"datb"),
    }
    assert len(names) == 4
    assert all(len(name) == 64 for name in names)
    assert content_identity("t", 1, 1, b"") == content_identity("t", 1, 1, b"")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"keep": 0.5, "budget": 5}, "keep and budget say the same; send one"),
        ({"keep": 0}, "keep is 0; accepted: more than 0, at most 1"),
        ({"keep": 1.01}, "keep is 1.01; accepted"),
        ({"keep": float("nan")}, "keep is nan; accepted"),
        ({"keep": "0.5"}, "keep is '0.5'; accepted"),
        ({"keep": True}, "keep is True; accepted"),
        ({"budget": 0}, "budget is 0; accepted: a whole number from 1 on"),
        ({"budget": 2.5}, "budget is 2.5; accepted: a whole number from 1 on"),
        ({"budget": "5"}, "budget is '5'; accepted: a whole number from 1 on"),
        ({"budget": True}, "budget is True; accepted: a whole number from 1 on"),
    ],
    ids=str,
)
def test_wishes_that_can_not_be(wish: dict[str, Any], message: str) -> None:
    """Half a token, sent from Python, failed within the engine."""
    with pytest.raises(InvalidRequest, match="^" + message) as caught:
        VisualTokens("dart", **wish)
    assert caught.value.param == "visual_tokens"
