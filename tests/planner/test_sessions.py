"""The workloads of the planner's check: the same for the same seed, new ones for another."""

from __future__ import annotations

import pytest

from fovea.planner.sessions import FITTED, PREDICTED, sessions


@pytest.mark.parametrize("name", [*FITTED, *PREDICTED])
def test_a_seed_gives_the_same_sessions_again_and_another_seed_others(name: str) -> None:
    assert sessions(name) == sessions(name) != sessions(name, seed=1)


def test_the_predicted_workloads_are_what_their_names_say() -> None:
    turns = {name: [turn for client in sessions(name) for turn in client] for name in PREDICTED}
    images = {name: [turn.image for turn in some if turn.image] for name, some in turns.items()}
    assert not images["text"]
    assert len(set(images["images"])) == len(turns["images"])
    assert len(set(images["shared image"])) == 1
    assert sum(turn.continues for turn in turns["follow-ups"]) > len(turns["follow-ups"]) / 2
    assert 0 < len(images["mixed"]) < len(turns["mixed"])
    assert len(set(images["mixed"])) < len(images["mixed"])


def test_only_follow_ups_continue_and_no_conversation_begins_with_one() -> None:
    for name in (*FITTED, *PREDICTED):
        for client in sessions(name):
            assert not client[0].continues
            assert name == "follow-ups" or not any(turn.continues for turn in client)


def test_scale_is_a_factor_of_the_sides_of_images() -> None:
    for one, half in zip(sessions("images"), sessions("images", scale=0.5), strict=True):
        for turn, smaller in zip(one, half, strict=True):
            assert turn.image
            assert smaller.image
            assert smaller.image[1:] == (turn.image[1] // 2, turn.image[2] // 2)
