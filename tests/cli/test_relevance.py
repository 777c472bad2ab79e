"""fovea relevance calibrate: which heads it chooses, what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import PIL.Image
import pytest

from fovea.engine.load import bundled_model
from fovea.engine.models.look_heads import read_heads
from tests.cli.support import Caller
from tests.support.checkpoints import write

FEW = ("--pictures", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "tiny"
    shutil.copytree(bundled_model(), folder)
    shutil.rmtree(folder / "fovea")
    return folder


def test_the_heads_are_written_beside_the_checkpoint(fovea: Caller, model: Path) -> None:
    """In fovea-tiny the heads of layer 3 look at what is asked about, with labels and without them."""
    outcome = fovea("relevance", "calibrate", model, *FEW, "--json")
    assert outcome.code == 0
    heads = tuple(tuple(head) for head in outcome.json["heads"])
    assert read_heads(model) == heads
    assert {layer for layer, _ in heads} == {3}
    scores = [entry["score"] for entry in outcome.json["ranking"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


def test_a_dry_run_prints_a_table_and_writes_nothing(fovea: Caller, model: Path, tmp_path: Path) -> None:
    PIL.Image.effect_noise((700, 500), 60).convert("RGB").save(tmp_path / "one.png")
    (tmp_path / "two.jpg").write_bytes(b"no picture")
    (tmp_path / "notes.txt").write_text("no picture either")
    before = read_heads(model)
    outcome = fovea("relevance", "calibrate", model, "--images", tmp_path, "--dry-run")
    assert outcome.code == 0
    assert outcome.out.splitlines()[0].replace("|", "").split() == ["layer", "head", "score", "chosen"]
    assert "two.jpg is left out" in outcome.err
    assert "nothing was written" in outcome.err
    assert read_heads(model) == before


def test_a_folder_without_pictures_is_refused(fovea: Caller, model: Path, tmp_path: Path) -> None:
    outcome = fovea("relevance", "calibrate", model, "--images", tmp_path)
    assert outcome.code == 2
    assert f"{tmp_path} holds no pictures; accepted: files that end in .bmp, .gif" in outcome.err
    missing = fovea("relevance", "calibrate", model, "--images", tmp_path / "none")
    assert missing.code == 2
    assert "none cannot be read: No such file or directory" in missing.err


def test_a_model_that_cannot_encode_by_region_is_refused(fovea: Caller, tmp_path: Path) -> None:
    outcome = fovea("relevance", "calibrate", write("gemma3", tmp_path), *FEW)
    assert outcome.code == 2
    assert "this model cannot encode images by region" in outcome.err


def test_tiles_are_looked_at_by_the_view_of_the_whole(fovea: Caller, tmp_path: Path) -> None:
    folder = write("llava_next", tmp_path)
    outcome = fovea("relevance", "calibrate", folder, *FEW)
    assert outcome.code == 0, outcome.err
    assert json.loads((folder / "fovea" / "look.json").read_text())["heads"]
