"""Sizes and videos in the flags of `fovea plan`."""

from __future__ import annotations

import pytest

from fovea.cli import main as cli
from fovea.cli.plan.make import workload_of
from fovea.core.errors import ConfigError
from fovea.planner.workload import Video, Workload


def workload(*flags: str) -> Workload:
    return workload_of(cli.build_parser("plan").parse_args(["plan", "model", *flags]))


def test_numbers_are_read() -> None:
    found = workload(
        "--image", "1024X768", "--image", "64x64", "--text", "7", "--json-share", "0.5", "--rate", "2"
    )
    (kind,) = found.kinds
    assert (kind.images, kind.text, kind.json, found.rate) == (((1024, 768), (64, 64)), 7, 0.5, 2.0)
    assert workload("--video", "16:640x360").kinds[0].video == Video(16, 640, 360)


@pytest.mark.parametrize("text", ["1024", "0x1", "65537x1", "\N{SUPERSCRIPT TWO}x3"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        workload("--image", text)


@pytest.mark.parametrize("text", ["16", "0:1x1", "\N{SUPERSCRIPT TWO}:1x1", "100001:1x1"])
def test_other_videos_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted"):
        workload("--video", text)
