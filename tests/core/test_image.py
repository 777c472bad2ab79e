"""What an image is: bytes of the right count, and one name for one content."""

from __future__ import annotations

import pytest

from fovea.core.image import Image, content_identity


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
