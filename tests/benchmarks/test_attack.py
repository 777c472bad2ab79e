"""Tests of benchmarks/attack: verdicts on invented logs, the table, and the files that attacks send."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "attack"))

import bombs
from attack_page import table
from catalogue import ATTACKS
from innocent import Log, picture
from result import Result

from fovea.media.image.probe import probe
from fovea.media.limits import MediaLimits
from fovea.media.source import InlineSource, parse_source
from fovea.media.video import probe_video

QUIET = {"text": Log([0.02] * 50), "image": Log([0.05] * 50)}


def a_result(text: Log, peak_mib: float = 1100.0) -> Result:
    logs = {"text": text, "image": Log([0.05] * 20)}
    return Result("name", "key", "story", logs, Counter({"429": 3}), baseline_mib=1000.0, peak_mib=peak_mib)


@pytest.mark.parametrize(
    ("text", "peak_mib", "verdict"),
    [
        (Log([0.02] * 20), 1100.0, "pass"),
        (Log([0.02] * 20 + [1.03]), 3000.0, "pass"),
        (Log([0.02] * 20 + [1.05]), 1100.0, "FAIL: text waited 1.05 s (bound 1.04 s)"),
        (Log([0.02], Counter({"429": 1})), 1100.0, "FAIL: text requests failed (1 x 429)"),
        (Log([0.02]), 3100.0, "FAIL: memory 3100 MiB (ceiling 3048 MiB)"),
    ],
)
def test_verdicts(text: Log, peak_mib: float, verdict: str) -> None:
    result = a_result(text, peak_mib)
    result.judge(QUIET, ceiling_mib=0)
    assert result.verdict == verdict


def test_a_stated_ceiling_replaces_the_default() -> None:
    result = a_result(Log([0.02]))
    result.judge(QUIET, ceiling_mib=1050)
    assert result.verdict == "FAIL: memory 1100 MiB (ceiling 1050 MiB)"


def test_table_has_a_row_for_each_attack() -> None:
    lines = table(
        [a_result(Log([0.02])), Result("other", "key", "story", skipped="it needs root")]
    ).splitlines()
    assert len(lines) == 4
    assert {len(line) for line in lines} == {len(lines[0])}
    assert "429: 3" in lines[2]
    assert "skipped: it needs root" in lines[3]


def test_every_attack_is_told() -> None:
    for name, attack in ATTACKS.items():
        assert attack.name == name
        assert attack.story
        assert attack.needs in ("key", "no key", "nothing")


def test_pictures_are_valid_as_far_as_their_headers_tell() -> None:
    """An attack with a file that the first check refuses would prove nothing."""
    limits = MediaLimits()
    black = probe(bombs.black_png(3, 70, 50), limits)
    assert (black.width, black.height) == (70, 50)
    assert bombs.black_png(1, 70, 50) != bombs.black_png(2, 70, 50)
    scans = bombs.many_scans(0, side=64, scans=9)
    assert scans.count(b"\xff\xda") == 9
    assert len(bombs.filled_jpeg(1, 5000)) == 5000
    source = parse_source(picture(5), limits)
    assert isinstance(source, InlineSource)
    assert picture(5) != picture(6)
    assert len(list(bombs.mutants(30))) == 30
    assert len({data for data, _ in bombs.video_mutants(12)}) == 12


def test_the_video_has_one_key_frame(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bombs, "CACHE", tmp_path)
    monkeypatch.setattr(bombs, "VIDEO_SIDE", 64)
    monkeypatch.setattr(bombs, "VIDEO_FRAMES", 300)
    header = probe_video(bombs.video(), MediaLimits())
    assert (len(header.stamps), len(header.keys)) == (300, 1)
