"""Arbitrary input gives an image or one of Fovea's own errors, within the deadline."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fovea.core.errors import FoveaError
from fovea.core.media import Image
from fovea.media.fetch.url import parse_remote
from fovea.media.image.decode import decode
from fovea.media.image.probe import FORMATS as PARSERS
from fovea.media.image.probe import peek
from fovea.media.limits import MediaLimits
from fovea.media.source import InlineSource, parse_source
from tests.media.samples import FORMATS, animation, encode, exif, picture, sample, with_jpeg_segment
from tests.support.thorough import examples

# Small limits: a corrupted header may claim a large size within the limits, which takes long to decode.
LIMITS = MediaLimits(max_pixels=1_000_000, first_frame_of_animation=True)
SETTINGS = settings(max_examples=examples(150), deadline=2000)

SEEDS = [
    *(sample(kind) for kind in FORMATS),
    *(animation(kind) for kind in ("PNG", "GIF", "WEBP")),
    encode(picture(mode="P"), "PNG", transparency=3),
    encode(picture(mode="1"), "PNG"),
    encode(picture(mode="RGBA"), "PNG"),
    encode(picture(), "JPEG", progressive=True),
    encode(picture(mode="CMYK"), "JPEG"),
    encode(picture(), "WEBP", lossless=True, exif=exif(6)),
    encode(picture(mode="P"), "BMP"),
    with_jpeg_segment(sample("JPEG"), 0xE1, exif(6)),
]

edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=6), st.integers(0, 6)), max_size=6
)


def image_or_error(data: bytes) -> Image | FoveaError:
    try:
        return decode(data, LIMITS)
    except FoveaError as error:
        return error


def survives(data: bytes) -> None:
    outcome = image_or_error(data)
    if isinstance(outcome, Image):
        assert outcome.width * outcome.height <= LIMITS.max_pixels
    else:
        assert 0 < len(outcome.message) < 400


@SETTINGS
@given(st.binary(max_size=300), st.sampled_from([b"", *(seed[:12] for seed in SEEDS)]))
def test_random_bytes(data: bytes, head: bytes) -> None:
    survives(head + data)


@settings(SETTINGS, max_examples=examples(600))
@given(st.sampled_from(SEEDS), edits, st.floats(0, 1))
def test_corrupted_pictures(data: bytes, changes: list[tuple[float, bytes, int]], keep: float) -> None:
    for where, new, drop in changes:
        at = int(where * len(data))
        data = data[:at] + new + data[at + drop :]
    survives(data if keep > 0.3 else data[: int(keep * 3 * len(data))])


@settings(SETTINGS, max_examples=examples(300))
@given(st.sampled_from(SEEDS), st.integers(0, 120), st.binary(min_size=1, max_size=4))
def test_corrupted_headers(data: bytes, at: int, new: bytes) -> None:
    survives(data[:at] + new + data[at + len(new) :])


@SETTINGS
@given(st.sampled_from(SEEDS), st.floats(0, 1))
def test_prefixes_of_pictures_peek(data: bytes, keep: float) -> None:
    header = peek(data[: 16 + int(keep * len(data))], LIMITS)
    assert header is None or (header.width, header.height) in {(40, 30), (30, 40), (24, 16)}


@SETTINGS
@given(
    st.text(max_size=80),
    st.sampled_from(["", "data:", "data:image/png;base64,", "http://", "file://", "https:"]),
)
@example("[", "http://")
@example("\ud800", "https://")
@example("a" * 70, "http://")
def test_random_urls(text: str, head: str) -> None:
    with suppress(FoveaError):
        source = parse_source(head + text, LIMITS)
        if isinstance(source, InlineSource):
            source.read(LIMITS)
    with suppress(FoveaError):
        parse_remote(head + text, LIMITS)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_every_parser_is_in_the_seeds(parser: object) -> None:
    assert any(parser.matches(seed[:16]) for seed in SEEDS)  # type: ignore[attr-defined]
