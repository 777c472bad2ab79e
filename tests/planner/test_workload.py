"""Workloads: files, ranges of their values, and the tokens of requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.core.settings import Setting, settings_of
from fovea.planner.workload import (
    Kind,
    Video,
    Workload,
    frame_group,
    read_workload,
    tokens_of,
    variants,
)
from tests.planner.small import pixels_by_64
from tests.support.thorough import examples

FILE = """
rate = 4.0
system = 150
ttft_ms = 1500
itl_ms = 60
percentile = 90
keep = 0.5
method = "dart"

[[request]]
name = "invoice"
share = 3
images = [[640, 640], [64, 64]]
text = 80
answer = 250
json = 1.0
forced = 0.5
seen = 0.1
follow_ups = 0.5

[[request]]
video = { frames = 7, size = [640, 64] }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "shop.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_all_values(tmp_path: Path) -> None:
    assert read_workload(write(tmp_path, FILE)) == Workload(
        kinds=(
            Kind(
                "invoice", share=3, images=((640, 640), (64, 64)), text=80, answer=250, follow_ups=0.5,
                seen=0.1, json=1.0, forced=0.5,
            ),
            Kind("request 2", video=Video(7, 640, 64)),
        ),
        rate=4.0, system=150, ttft_ms=1500, itl_ms=60, percentile=90, keep=0.5, method="dart",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate = 0", ("rate is 0", "1e-06 to 1000000")),
        ("rates = 1", ("unknown key 'rates'", "did you mean 'rate'?")),
        ("keep = nan", ("keep is nan", "0.01 to 1")),
        ("percentile = 100", ("percentile is 100", "50 to 99.9")),
        ('method = "darts"', ("method is 'darts'", "did you mean 'dart'?")),
        ("system = 1.5", ("system is 1.5", "0 to 1048576")),
        ("request = 3", ("request is not an array of tables", "[[request]]")),
        ("", ("no requests", "[[request]]")),
        ("[[request]]\nshare = 0", ("shares of all requests are 0",)),
        ("[[request]]\n[[request]]\ntexts = 5", ("number 2", "unknown key 'texts'", "'text'")),
        ("[[request]]\ntext = true", ("number 1", "text is True", "1 to 1048576")),
        ("[[request]]\nimages = 4", ("images is 4", "[[width, height], ...]")),
        ("[[request]]\nimages = [[4]]", ("images has [4]", "[width, height]")),
        ("[[request]]\nimages = [[0, 4]]", ("images has [0, 4]", "1 to 65536")),
        ("[[request]]\nvideo = 16", ("video is 16", "frames")),
        ("[[request]]\nvideo = { frames = 0, size = [1, 1] }", ("video", "frames is 0", "1 to 100000")),
        ("[[request]]\nvideo = { frame = 4 }", ("unknown key 'frame'", "did you mean 'frames'?")),
        ("[[request]]\nvideo = { frames = 4 }", ("size has None",)),
        ("[[request]\n", ("is not TOML",)),
    ],
)
def test_errors_name_file_place_field_and_accepted_values(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_workload(path)
    for word in ("workload file", str(path), *words):
        assert word in str(caught.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "no.toml")


@pytest.mark.parametrize(
    "entry", [entry for cls in (Workload, Kind) for entry in settings_of(cls) if entry.rule.high is not None]
)
def test_values_from_code_have_the_ranges_of_files(entry: Setting) -> None:
    def build(value: Any) -> object:
        if entry in settings_of(Workload):
            return Workload((Kind("a"),), **{entry.name: value})
        return Kind("a", **{entry.name: value})

    low, high = entry.rule.low, entry.rule.high
    assert low is not None
    assert high is not None
    build(low), build(high)
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(ConfigError, match=f"{entry.name} is .*; accepted: "):
            build(value)


def test_sizes_from_code_are_checked() -> None:
    with pytest.raises(ConfigError, match="images: a size is 0x5"):
        Kind("a", images=((0, 5),))
    with pytest.raises(ConfigError, match="frames of a video are 0"):
        Video(0, 5, 5)
    with pytest.raises(ConfigError, match="video: a size is 5x70000"):
        Video(1, 5, 70_000)


def test_tokens_of_a_request_are_counted() -> None:
    kind = Kind("a", images=((640, 640),), text=10, answer=20, follow_ups=1, seen=0.5, json=0.5, forced=0.4)
    workload = Workload((kind,), system=5)
    tokens = tokens_of(kind, workload, pixels_by_64)
    assert tokens.images == tokens.encoder_rows == (100,)
    assert tokens.visual == 100
    assert tokens.encoded == 0.25  # one of two requests is the first, and half of the images are known
    assert tokens.prompt == 5 + 100 + 10 + 15  # the second question has 30 tokens more
    assert tokens.computed == 100 / 2 + 10
    assert tokens.chosen == 20 * (1 - 0.2)
    assert tokens.last == 5 + 100 + 10 + 20 + 30
    assert tokens.context == tokens.prompt + 10
    assert tokens.longest == tokens.prompt + 20


def test_reduction_before_the_encoder_spares_it_and_reduction_behind_it_does_not() -> None:
    kind = Kind("a", images=((640, 640),))
    before = tokens_of(kind, Workload((kind,), keep=0.25, method="relevance"), pixels_by_64)
    behind = tokens_of(kind, Workload((kind,), keep=0.25, method="dart"), pixels_by_64)
    assert before.visual == behind.visual == 25
    assert (before.encoder_rows, behind.encoder_rows) == ((25,), (100,))
    assert before.images == behind.images == (100,)


def test_frames_of_a_video_are_grouped_as_the_family_does() -> None:
    kind = Kind("a", video=Video(7, 640, 640))
    paired = tokens_of(kind, Workload((kind,)), pixels_by_64, frame_group("qwen3_vl"))
    single = tokens_of(kind, Workload((kind,)), pixels_by_64, frame_group("internvl"))
    assert (len(paired.images), len(single.images)) == (4, 7)
    assert (paired.visual, single.visual) == (400, 700)


@settings(max_examples=examples(60))
@given(
    st.floats(0, 5), st.floats(0, 1), st.integers(1, 500), st.integers(1, 500), st.integers(0, 300),
    st.booleans(), st.floats(0.01, 1),
)  # fmt: skip
def test_variants_have_the_mean_of_the_conversation(
    follow_ups: float, seen: float, text: int, answer: int, system: int, image: bool, keep: float
) -> None:
    images = ((640, 640),) if image else ()
    kind = Kind("a", images=images, text=text, answer=answer, follow_ups=follow_ups, seen=seen)
    workload = Workload((kind,), system=system, keep=keep)
    tokens = tokens_of(kind, workload, pixels_by_64)
    parts = variants(kind, workload, tokens)
    assert sum(share for share, _ in parts) == pytest.approx(1)
    for name in ("encoded", "prompt", "computed", "answer"):
        mean = sum(share * getattr(one, name) for share, one in parts)
        assert mean == pytest.approx(getattr(tokens, name), rel=1e-9, abs=1e-9)
    assert all(one.computed <= one.prompt + 1e-9 for _, one in parts)


@settings(max_examples=examples(30))
@given(st.floats(0.01, 1), st.floats(0.01, 1))
def test_fewer_kept_tokens_are_never_more_work(one: float, other: float) -> None:
    kind = Kind("a", images=((640, 640),))
    less, more = (
        tokens_of(kind, Workload((kind,), keep=keep), pixels_by_64) for keep in sorted((one, other))
    )
    assert less.visual <= more.visual
    assert less.encoder_rows <= more.encoder_rows
    assert less.computed <= more.computed


def test_requests_per_s_count_follow_ups() -> None:
    kinds = (Kind("a", share=1), Kind("b", share=3, follow_ups=2))
    workload = Workload(kinds, rate=2)
    assert workload.shares == (0.25, 0.75)
    assert workload.requests_per_s == 2 * (0.25 + 0.75 * 3)
    assert replace(workload, rate=4).requests_per_s == 2 * workload.requests_per_s
