"""Images have as many bytes as their size needs, and an identity that depends on their content alone."""

from __future__ import annotations

from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, VisualTokens, content_identity


def test_the_number_of_bytes_must_match_the_dimensions() -> None:
    assert Image("x", 2, 3, bytes(18)).rgb == bytes(18)
    with pytest.raises(ValueError, match="17 bytes, 2x3x3 needed"):
        Image("x", 2, 3, bytes(17))


def test_images_of_equal_identity_are_equal() -> None:
    assert Image("x", 1, 1, b"abc") == Image("x", 1, 1, b"xyz")
    assert Image("x", 1, 1, b"abc") != Image("y", 1, 1, b"abc")
    assert "abc" not in repr(Image("x", 1, 1, b"abc"))


def test_identity_depends_on_every_part_and_on_where_each_part_ends() -> None:
    identities = {
        content_identity("image/png", 1, 23, b"data"),
        content_identity("image/png", 12, 3, b"data"),
        content_identity("image/pn", 1, 23, b"gdata"),
        content_identity("image/png", 1, 23, b"datb"),
    }
    assert len(identities) == 4
    assert all(len(identity) == 64 for identity in identities)
    assert content_identity("t", 1, 1, b"") == content_identity("t", 1, 1, b"")


@pytest.mark.parametrize(
    ("values", "message"),
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
def test_impossible_numbers_of_visual_tokens_are_refused(values: dict[str, Any], message: str) -> None:
    """A bug: a budget of half a token, set from Python, failed only inside the engine."""
    with pytest.raises(InvalidRequest, match="^" + message) as caught:
        VisualTokens("dart", **values)
    assert caught.value.param == "visual_tokens"
