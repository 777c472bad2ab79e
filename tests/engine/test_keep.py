"""Rules about which keys and values are kept: their texts, their points, and the models that take them."""

from __future__ import annotations

import pytest

from fovea.core.errors import InvalidRequest
from fovea.engine.keep import (
    NEVER,
    NOTHING_DROPPED,
    RECENT,
    SINKS,
    WINDOW,
    KeepPolicy,
    KeepRule,
    Kept,
    kept_at,
    next_point,
    parse_keep,
)


def test_a_rule_is_read_and_written_in_one_way() -> None:
    assert parse_keep("all") is None
    for text in ("snap:0.25", "window:4096", "text:0.5", "images:128", "snap:1000001"):
        assert str(parse_keep(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snop:0.25", "did you mean 'snap'"),
        ("snap", "a share between 0 and 1 or a whole number of tokens from 128 on"),
        ("snap:0", "a share between 0 and 1"),
        ("snap:1", "a share between 0 and 1"),
        ("snap:-0.5", "a share between 0 and 1"),
        ("snap:nan", "a share between 0 and 1"),
        ("snap:inf", "a share between 0 and 1"),
        ("snap:127", "a whole number of tokens from 128 on"),
        ("snap:200.5", "a whole number of tokens"),
        ("", "accepted: all, window, snap, text, images"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        parse_keep(text)
    assert error.value.param == "kv_keep"


def test_a_share_counts_once_and_only_if_something_is_left_out() -> None:
    rule = KeepRule("snap", share=0.25)
    assert next_point(rule, 400, NOTHING_DROPPED, 16) == 400
    kept = kept_at(rule, 400, NOTHING_DROPPED, 300, 16)
    assert kept == Kept(400, 0, 100)
    assert kept.dropped == 300
    assert next_point(rule, 400, kept, 16) == NEVER
    assert next_point(rule, RECENT + SINKS, NOTHING_DROPPED, 16) == NEVER


def test_a_bound_is_never_passed() -> None:
    rule = KeepRule("snap", tokens=200)  # 192 in whole blocks
    kept, points = NOTHING_DROPPED, []
    for _ in range(4):
        point = next_point(rule, 1000, kept, 16)
        assert point - kept.dropped == 192
        kept = kept_at(rule, point, kept, 0, 16)
        points.append(point)
    assert points == [192, 240, 288, 336]
    assert kept.rows == 144


@pytest.mark.parametrize(
    ("method", "visual", "expected"),
    [
        ("text", 300, Kept(400, 0, 100)),  # as many other tokens as there is room for
        ("text", 350, Kept(400, 50, 50)),
        ("images", 300, Kept(400, 64, 36)),  # the question stays
        ("images", 60, Kept(400, 60, 40)),
        ("images", 400, Kept(400, 100, 0)),
        ("snap", 300, Kept(400, 0, 100)),
    ],
)
def test_methods_divide_the_room_between_images_and_text(method: str, visual: int, expected: Kept) -> None:
    assert kept_at(KeepRule(method, share=0.25), 400, NOTHING_DROPPED, visual, 16) == expected


def test_what_was_kept_of_images_counts_at_the_next_point() -> None:
    rule = KeepRule("text", tokens=128)
    first = kept_at(rule, 128, NOTHING_DROPPED, 100, 16)
    assert first == Kept(128, 68, 28)
    assert kept_at(rule, 160, first, 0, 16) == Kept(160, 36, 60)


def test_a_model_takes_the_rules_that_it_can_follow() -> None:
    plain = {"rows": 1024, "states": False, "windows": False, "whole_images": False}
    policy = KeepPolicy.of("snap:0.5", 16, **plain)
    assert policy.rule(None) == KeepRule("snap", share=0.5)
    assert policy.rule("all") is None
    assert policy.rule("window:128") == KeepRule("window", tokens=128)
    with pytest.raises(InvalidRequest, match="at least two KV blocks .*, 512 tokens"):
        KeepPolicy.of("all", 256, **plain).rule("snap:400")
    stateful = KeepPolicy.of("all", 16, **{**plain, "states": True})
    assert stateful.rule(None) is None
    with pytest.raises(InvalidRequest, match="layers with a state"):
        stateful.rule("snap:0.5")
    for kind, reason in (("windows", "a sliding window"), ("whole_images", "tokens see each other")):
        policy = KeepPolicy.of("all", 16, **{**plain, kind: True})
        assert policy.rule("snap:0.5") is not None
        with pytest.raises(InvalidRequest, match=reason):
            policy.rule("snap:512")


@pytest.mark.parametrize("block_size", [1, 10, 15, 16, 26, 30, 31, 32, 64])
def test_the_tokens_that_decide_come_after_what_was_kept(block_size: int) -> None:
    """With 30 tokens per block and a bound of 128, three quarters left less than 32 tokens between points."""
    for tokens in range(128, 400):
        rule = KeepRule("snap", tokens=tokens)
        if rule.bound(block_size) < 2 * block_size:
            continue
        first = kept_at(
            rule, next_point(rule, 0, NOTHING_DROPPED, block_size), NOTHING_DROPPED, 0, block_size
        )
        assert first.rows >= RECENT + SINKS
        assert first.rows % block_size == 0
        assert next_point(rule, 0, first, block_size) - first.until >= WINDOW


def test_a_bound_makes_room_for_more_tokens_than_the_pool_holds() -> None:
    policy = KeepPolicy(rows=1024)
    assert policy.most_context(8192, None) == 1024
    assert policy.most_context(8192, KeepRule("snap", share=0.5)) == 1024
    assert policy.most_context(8192, KeepRule("snap", tokens=1024)) == 8192
    assert policy.most_context(8192, KeepRule("snap", tokens=1025)) == 1024
