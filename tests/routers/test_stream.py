"""The stream of requests that is sent through routers, and what is counted."""

from __future__ import annotations

from collections import Counter
from io import BytesIO

from PIL import Image

from tests.routers.stream import APART, Ask, Reply, body, judge, order, picture, reply, text
from tests.routers.table import Row, table


def test_subjects_come_back_when_the_last_answer_about_them_is_there() -> None:
    asks = order(seed=3, subjects=10, asks=4)
    assert Counter(ask.subject for ask in asks) == dict.fromkeys(range(10), 4)
    last: dict[int, int] = {}
    for place, ask in enumerate(asks):
        assert ask.turn == 0 or place - last[ask.subject] > APART
        last[ask.subject] = place


def test_only_repeats_count_and_only_if_most_of_the_prompt_was_cached() -> None:
    replies = [Reply(Ask(0, 0), 100, 0), Reply(Ask(0, 1), 100, 96), Reply(Ask(0, 2), 100, 16)]
    found = judge(replies, (1, 2))
    assert (found.warm, found.repeats, found.share) == (1, 2, 0.5)
    assert round(found.busier, 2) == 0.67


def test_an_answer_without_details_of_its_prompt_had_nothing_cached() -> None:
    assert reply(Ask(1, 1), {"usage": {"prompt_tokens": 9}}) == Reply(Ask(1, 1), 9, 0)


def test_each_subject_is_its_own_and_the_same_every_time() -> None:
    assert Image.open(BytesIO(picture("a"))).size == (320, 240)
    assert picture("a") == picture("a") != picture("b")
    assert text("a").split()[:8] != text("b").split()[:8]
    first, second = (body("images", "way", Ask(1, turn))["messages"][0]["content"] for turn in (0, 1))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_the_table_says_which_share_of_repeats_was_warm() -> None:
    rows = [
        Row("smg 1.13", "cache_aware", "images", judge([Reply(Ask(0, 1), 10, 9)] * 9, (5, 5)), ""),
        Row("smg 1.13", "round_robin", "images", judge([Reply(Ask(0, 1), 10, 0)] * 9, (9, 1)), "a note"),
    ]
    assert "| smg 1.13 | cache_aware | images | 9 of 9 (100%) | 50% | |" in table(rows)
    assert "| smg 1.13 | round_robin | images | 0 of 9 (0%) | 90% | a note |" in table(rows)
