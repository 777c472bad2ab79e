"""fovea batch --cluster: what is refused before anything starts. With Ray: tests/cluster."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from fovea.cli.batch_cluster import EngineRunners, HttpRunners
from fovea.cluster.batch_http import HttpOptions
from fovea.core.constraints import AnswerFormat
from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from tests.cli.support import Caller


def test_without_ray_the_message_names_the_extra(
    fovea: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("fovea.cluster.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = fovea("batch", tmp_path, tmp_path / "out", "--cluster", "local", "--prompt", "what?")
    assert outcome.code == 2
    assert outcome.error_line.startswith("fovea: --cluster needs Ray, which is not here (")
    assert outcome.error_line.endswith("pip install 'fovea-vlm[cluster]' adds it")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "http://x"), "--url is for batches with --cluster"),
        (("--api-key", "k"), "--api-key is for batches with --cluster"),
        (("--workers", "2"), "--workers is for batches with --cluster"),
        (("--block", "2"), "--block is for batches with --cluster"),
        (("--cluster", "local", "--block", "0"), "--block is 0; accepted: 1 or more"),
        (("--cluster", "local", "--workers", "-1"), "--workers is -1; accepted: 1 or more"),
    ],
)
def test_flags_that_are_refused(fovea: Caller, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    outcome = fovea("batch", tmp_path, tmp_path / "out", "--prompt", "what?", *words)
    assert (outcome.code, outcome.error_line) == (2, f"fovea: {message}")


@pytest.mark.parametrize("places", [("s3://bucket/in", "out.jsonl"), ("in.jsonl", "s3://bucket/out")])
def test_object_stores_need_a_cluster(fovea: Caller, places: tuple[str, str]) -> None:
    outcome = fovea("batch", *places)
    assert outcome.code == 2
    assert "addresses of object stores need --cluster" in outcome.error_line


def test_what_makes_runners_can_travel() -> None:
    http = HttpRunners(HttpOptions("http://x", "key", params={"max_tokens": 3}))
    assert pickle.loads(pickle.dumps(http)) == http
    params = {"max_tokens": 3, "format": AnswerFormat.regex("a+")}
    engine = EngineRunners("fovea-tiny", EngineConfig(), None, params, PixelBudget(), "what?", 4)
    assert pickle.loads(pickle.dumps(engine)) == engine
