"""Numbers in the flags of `fovea plan`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fovea.cli.plan.make import _counts, _size, _video
from fovea.core.errors import ConfigError


def test_numbers_are_read() -> None:
    assert _counts("4, 1,2,2") == (1, 2, 4)
    assert _size("1024X768") == (1024, 768)
    assert _video("16:640x360").frames == 16


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (_counts, "1,"), (_counts, "0"), (_counts, "1025"), (_counts, "\N{SUPERSCRIPT TWO}"),
        (_size, "1024"), (_size, "0x1"), (_size, "65537x1"), (_size, "\N{SUPERSCRIPT TWO}x3"),
        (_video, "16"), (_video, "0:1x1"), (_video, "\N{SUPERSCRIPT TWO}:1x1"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        read(text)
