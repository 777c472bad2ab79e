"""Clients that wait for their answers: the next request begins when the one before has ended."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.trace import TraceRequest
from fovea.engine.config import EngineConfig
from fovea.engine.simulate.run import Next, simulate, simulated_records
from fovea.planner.cost import Composition, CostModel
from tests.support.thorough import is_thorough

COST = CostModel(
    step_s=0.01, decode_s=0.001, context_s=0, token_s=1e-4, chunk_s=0, pair_s=0, between_s=0,
    image_s=0, visual_s=1e-3, visual_pair_s=0, slice_s=0.005, kv_token_bytes=1024, visual_token_bytes=1024,
)  # fmt: skip
FREE = EngineConfig.of(pace=0, max_queue=0)


def test_a_client_sends_its_next_request_after_the_answer_and_a_pause() -> None:
    trace = (TraceRequest(1.0, 50, 3), TraceRequest(0.5, 50, 3))
    first, second = simulated_records(trace, FREE, COST, following={0: Next(1)})
    assert first.arrival == 1.0
    assert second.arrival == pytest.approx(first.tokens[-1] + 0.5)


def test_a_follow_up_computes_only_what_its_conversation_does_not_hold_yet() -> None:
    trace = (TraceRequest(0.0, 600, 8), TraceRequest(0.0, 20, 8))
    alone = COST.step(Composition(prompt_tokens=20, chunks=1))
    for continues, at_least, at_most in ((False, alone, 1.01 * alone), (True, alone, 1.3 * alone)):
        records = simulated_records(trace, FREE, COST, following={0: Next(1, continues)})
        ttft = records[1].tokens[0] - records[1].arrival
        # With the conversation the prompt has 648 tokens more. They are cached, but for a part of one block.
        assert at_least * 0.99 <= ttft <= at_most


def test_an_image_of_the_conversation_is_not_encoded_again() -> None:
    trace = (TraceRequest(0.0, 20, 4, (("cat", 300),)), TraceRequest(0.0, 20, 4))
    report = simulate(trace, FREE, COST, following={0: Next(1, continues=True)})
    assert report.images_encoded == 1
    assert report.classes["cached image"].requests == 1


def test_preparation_delays_the_first_token_by_itself() -> None:
    trace = (TraceRequest(0.0, 50, 2),)
    (plain,) = simulated_records(trace, FREE, COST)
    (prepared,) = simulated_records(trace, FREE, COST, prepare=lambda request: 0.25)
    assert prepared.arrival == plain.arrival == 0.0
    assert prepared.tokens[0] == pytest.approx(plain.tokens[0] + 0.25)


def test_a_client_goes_on_after_a_request_that_was_refused() -> None:
    trace = (TraceRequest(0.0, 100_000, 2), TraceRequest(0.0, 10, 2))
    records = simulated_records(trace, FREE, COST, following={0: Next(1)})
    assert [record.reason for record in records] == ["refused", "length"]


@settings(max_examples=40 if is_thorough() else 8, deadline=None)
@given(
    clients=st.lists(
        st.lists(st.tuples(st.integers(1, 400), st.integers(1, 12), st.booleans()), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    pace=st.sampled_from([0.0, 2.5]),
)
def test_every_request_ends_and_none_begins_before_the_one_before_it(
    clients: list[list[tuple[int, int, bool]]], pace: float
) -> None:
    trace, following, numbers = [], {}, []
    for client in clients:
        own = list(range(len(trace), len(trace) + len(client)))
        numbers.append(own)
        trace += [TraceRequest(0.0, text, output) for text, output, _ in client]
        following |= {
            number: Next(number + 1, continues)
            for number, (_, _, continues) in zip(own[:-1], client[1:], strict=True)
        }
    records = simulated_records(tuple(trace), FREE.changed(pace=pace), COST, following=following)
    assert all(len(record.tokens) == request.output for record, request in zip(records, trace, strict=True))
    for own in numbers:
        for before, after in pairwise(own):
            assert records[after].arrival == pytest.approx(records[before].tokens[-1])
