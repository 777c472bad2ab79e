"""Dense targets of frames, groups of frames and pairs."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

SIZE = (192, 160)
TOKENS = 30


@pytest.mark.parametrize("seed", range(4))
def test_in_a_group_one_item_moves_from_one_patch_to_another(
    seed: int, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.several, "FRAMES", (4,))
    batch = training.several.motion_batch(Random(seed), training.packer, SIZE, 3, True)
    moved = batch["moved"].reshape(3, 2, TOKENS * 4)
    assert (np.count_nonzero(moved == 1, axis=2) == 1).all()
    assert (np.count_nonzero(moved == 2, axis=2) == 1).all()
    # Both patches, where the item was and where it is, have the same target.
    centres = batch["centres"].reshape(3, 2, TOKENS * 4)
    np.testing.assert_array_equal(centres[moved == 1], centres[moved == 2])
    # There are no counts, because the item would count twice.
    assert (batch["counts"] == -1).all()
    assert batch["images"].shape == (3, 2, 2, 160, 192, 3)


def test_an_odd_last_frame_is_used_twice(training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.several, "FRAMES", (3,))
    batch = training.several.motion_batch(Random(5), training.packer, SIZE, 2, True)
    moved = batch["moved"].reshape(2, 2, TOKENS * 4)
    assert (np.count_nonzero(moved, axis=2) == (2, 0)).all()
    np.testing.assert_array_equal(batch["images"][:, 1, 0], batch["images"][:, 1, 1])


@pytest.mark.parametrize("video", [False, True])
def test_before_is_the_content_of_the_previous_picture(
    video: bool, training: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.several, "FRAMES", (6,))
    batch = training.several.motion_batch(Random(7), training.packer, SIZE, 2, video)
    pictures = batch["images"].shape[1]
    centres, before = (batch[name].reshape(2, pictures, TOKENS, 4) for name in ("centres", "before"))
    assert (before[:, 0] == -1).all()
    np.testing.assert_array_equal(before[:, 1:], centres[:, :-1])


def test_times_are_those_of_the_middle_of_each_group(training: SimpleNamespace) -> None:
    assert training.several.group_times(5, 2.0) == (0.25, 1.25, 2.0)
    assert training.several.group_times(1, 2.0) == (0.0,)


def test_a_still_video_has_the_targets_of_an_image(training: SimpleNamespace) -> None:
    batch = training.several.still_batch(Random(3), training.packer, SIZE, 2, 4)
    groups = batch["images"].shape[1]
    assert "moved" not in batch
    assert "before" not in batch
    assert len(batch["centres"]) == 2 * groups * TOKENS
    assert len(batch["slots"]) == 2 * groups * TOKENS
    assert set(batch["tokens"].flatten()[batch["slots"]]) == {training.packer.video}
