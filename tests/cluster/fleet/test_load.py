"""The load: the same for the same seed, drawn as it is needed, with the rates that its shape promises."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fovea.cluster.fleet.load import Conversation, Load, TraceLoad, Turn
from fovea.core.errors import ConfigError
from fovea.core.trace import TraceRequest
from tests.cluster.fleet.samples import LOAD, change


@pytest.mark.parametrize("shape", ["steady", "daily", "bursty"])
def test_the_same_seed_gives_the_same_conversations(shape: str) -> None:
    load = change(LOAD, shape=shape, day_s=60, burst_s=2, calm_s=5)
    found = list(load.conversations())
    assert found == list(load.conversations())
    assert found != list(change(load, seed=1).conversations())
    assert sum(len(one.turns) for one in found) == load.requests
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert len({one.key for one in found}) == len(found)


def test_a_million_conversations_are_not_drawn_at_once() -> None:
    endless = Load(requests=10**8, images=100).conversations()
    assert len(list(itertools.islice(endless, 3))) == 3


def test_an_image_has_one_size_and_popular_ones_come_again() -> None:
    found = [one for one in change(LOAD, requests=4000).conversations() if one.image]
    assert {one.visual for one in found} == set(LOAD.visual_tokens)
    assert len({(one.image, one.visual) for one in found}) == len({one.image for one in found})
    counted = Counter(one.image for one in found)
    assert counted["image-0"] == max(counted.values()) > 10 * min(counted.values())


def test_a_day_has_its_peak_at_noon() -> None:
    load = change(LOAD, requests=20_000, rate=100, turns=1, shape="daily", day_s=200, swing=0.8)
    quarters = Counter(int(one.at // 50) for one in load.conversations())
    assert quarters[1] + quarters[2] > 2 * (quarters[0] + quarters[3])
    assert 0.9 * 20_000 < quarters[0] + quarters[1] + quarters[2] + quarters[3] <= 20_000


def test_bursts_keep_the_mean_rate() -> None:
    load = change(
        LOAD, requests=30_000, rate=100, turns=1, shape="bursty", burst_s=2, calm_s=6, burst_factor=5
    )
    times = [one.at for one in load.conversations()]
    assert 0.8 < len(times) / times[-1] / load.rate < 1.25
    seconds = Counter(int(at) for at in times)
    assert max(seconds.values()) > 3 * sorted(seconds.values())[len(seconds) // 4]


def test_a_trace_has_the_same_requests() -> None:
    trace, following = LOAD.as_trace()
    turns = [turn for one in LOAD.conversations() for turn in one.turns]
    assert [(one.text, one.output) for one in trace] == [(turn.text, turn.output) for turn in turns]
    assert len(following) == len(turns) - sum(1 for _ in LOAD.conversations())
    assert all(one.continues for one in following.values())


def test_an_unknown_shape() -> None:
    with pytest.raises(ConfigError, match="shape is 'weekly'"):
        Load(shape="weekly")


def test_a_trace_is_a_load_of_single_questions() -> None:
    trace = (
        TraceRequest(0.5, 10, 3, (("a", 64), ("b", 64)), system=20),
        TraceRequest(1.5, 11, 4, system=50),
    )
    load = TraceLoad(trace)
    assert (load.requests, load.system_tokens) == (2, 20)
    first, second = load.conversations()
    assert first == Conversation(0.5, "request-0", "a + b", 128, (Turn(10, 3, 0.0),), 2)
    assert second == Conversation(1.5, "request-1", "", 0, (Turn(41, 4, 0.0),), 1)
    with pytest.raises(ConfigError, match="no request"):
        TraceLoad(())
