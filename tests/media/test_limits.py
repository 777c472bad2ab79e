"""MediaLimits accepts its defaults; the error of a wrong value names the value and the accepted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from fovea.core.errors import ConfigError
from fovea.media.limits import PILLOW_MAX_PIXELS, MediaLimits


@pytest.mark.parametrize(
    ("field", "value", "fragment"),
    [
        ("max_images", 0, "accepted: 1 to 1024"),
        ("max_images", 2.5, "max_images is 2.5"),
        ("max_images", True, "max_images is True"),
        ("max_bytes", 2 << 30, "accepted: 1 to 1073741824"),
        ("max_pixels", PILLOW_MAX_PIXELS + 1, "accepted: 1 to 89478485"),
        ("max_side", 70000, "accepted: 1 to 65535"),
        ("min_side", 20000, "at most max_side (16384)"),
        ("max_aspect_ratio", 0.5, "accepted: 1 to 65535"),
        ("fetch_timeout_s", 0, "fetch_timeout_s is 0"),
        ("fetch_timeout_s", float("nan"), "fetch_timeout_s is nan"),
        ("connect_timeout_s", -1.0, "connect_timeout_s"),
        ("max_redirects", 21, "accepted: 0 to 20"),
        ("decode_threads", 0, "accepted: 1 to 256"),
        ("allowed_schemes", ("https", "ftp"), "'ftp'; accepted: data, http, https, file"),
        ("allowed_ports", (443, 0), "allowed_ports has 0"),
        ("allowed_hosts", ("https://example.com",), "accepted: a lower-case name"),
        ("allowed_hosts", ("Example.com",), "allowed_hosts has 'Example.com'"),
        ("allowed_hosts", ("a.*.com",), "a.*.com"),
        ("file_root", Path("relative"), "accepted: the absolute path of a folder"),
        ("file_root", Path("/nonexistent/folder"), "/nonexistent/folder"),
    ],
)
def test_refuses(field: str, value: Any, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MediaLimits(**{field: value})
    assert fragment in caught.value.message
    assert caught.value.param == field


def test_accepted_values(tmp_path: Path) -> None:
    MediaLimits(allowed_hosts=("example.com", "*.example.org"), file_root=tmp_path, max_aspect_ratio=1)


def test_the_pixel_ceiling_keeps_pillows_own_guard_active() -> None:
    assert Pillow.MAX_IMAGE_PIXELS == PILLOW_MAX_PIXELS
    assert MediaLimits().max_pixels <= PILLOW_MAX_PIXELS
