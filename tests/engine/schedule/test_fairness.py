"""Short prompts beside long ones, and clients in turn."""

from __future__ import annotations

import pytest

from fovea.core.trace import Trace, TraceRequest
from fovea.engine.config import EngineConfig
from fovea.engine.schedule.itl_limit import IDLE_STEP_S
from fovea.engine.schedule.plan import StepPlan
from fovea.engine.simulate.run import simulated_records
from fovea.planner.cost import CostModel
from tests.support.brains import SlotRunner, answer, scheduler, sequence

COST = CostModel(
    step_s=0.03, decode_s=0.001, context_s=0, token_s=0.001, chunk_s=0.002, pair_s=1e-8, between_s=0.0005,
    kv_token_bytes=1000,
)  # fmt: skip
"""A machine that reads a prompt of 2,600 tokens in 2.6 s, and one of 20 tokens in 0.05 s."""
LONG, SHORT = 2600, 20
STEP_S = 2 * IDLE_STEP_S + COST.step_s
"""The longest step without decodes."""


def amounts(plan: StepPlan) -> dict[str, int]:
    return {work.seq.id: work.count for work in plan.work}


def first_tokens(trace: Trace, policy: str = "dual") -> dict[int, list[float]]:
    """Serve a trace on the simulator. Returns the seconds to first tokens, ascending, by length of prompt."""
    trace = tuple(sorted(trace, key=lambda request: request.at))
    records = simulated_records(trace, EngineConfig.of(kv_cache_mib=400, policy=policy), COST)
    seconds: dict[int, list[float]] = {LONG: [], SHORT: []}
    for request, record in zip(trace, records, strict=True):
        seconds[request.text].append(record.tokens[0] - record.arrival)
    return {length: sorted(values) for length, values in seconds.items()}


@pytest.mark.parametrize("tokens", [1, 16], ids=["first tokens only", "with decodes"])
@pytest.mark.parametrize("every", [0.01, 2.7], ids=["sixteen at once", "at saturation"])
def test_a_short_prompt_beside_long_ones_comes_soon(every: float, tokens: int) -> None:
    """A long prompt of 2.6 s once made a short one wait for 2.3 s, and sixteen of them for 40 s.

    The bound is three times the time on a quiet machine, plus the step that runs when it arrives.
    """
    quiet = first_tokens((TraceRequest(0, SHORT, tokens),))[SHORT][0]
    long = tuple(TraceRequest(every * number, LONG, tokens) for number in range(16))
    short = tuple(TraceRequest(0.3 + 0.37 * number, SHORT, tokens) for number in range(100))
    fair, unfair = first_tokens(long + short), first_tokens(long + short, "fcfs")
    assert fair[SHORT][-1] <= 3 * quiet + STEP_S
    assert unfair[SHORT][-1] > 10 * fair[SHORT][-1]
    # Half of the time is theirs, so long prompts take longer, but at most twice as long.
    assert fair[LONG][-1] <= 2 * unfair[LONG][-1]


def test_a_long_prompt_advances_in_every_step_beside_short_ones() -> None:
    brain = scheduler(blocks=400, max_step_tokens=64)
    runner = SlotRunner(brain)
    brain.add(sequence("long", [99] * 600, max_tokens=1))
    for number in range(12):
        brain.add(sequence(f"short {number}", [number] * 30, arrival=1 + number, max_tokens=1))
        assert amounts(runner.step()) == {"long": 34, f"short {number}": 30}
    runner.run()


def test_prompts_of_similar_length_are_computed_one_after_the_other() -> None:
    """To share steps among them would make all of them late."""
    brain = scheduler(blocks=400, max_step_tokens=64)
    runner = SlotRunner(brain)
    for number in range(3):
        brain.add(sequence(f"{number}", [number] * 128, arrival=number, max_tokens=1))
    assert [amounts(plan) for plan in runner.run()] == [{name: 64} for name in ("0", "0", "1", "1", "2", "2")]


def test_a_room_that_is_too_small_to_be_halved_alternates() -> None:
    brain = scheduler(blocks=400, max_step_tokens=20)
    runner = SlotRunner(brain)
    brain.add(sequence("long", [7] * 200, max_tokens=1))
    runner.step()
    brain.add(sequence("short", [5] * 40, arrival=1, max_tokens=1))
    counts = [amounts(runner.step()) for _ in range(4)]
    assert [count.get("short", 0) for count in counts] == [20, 0, 20, 0]
    assert [count.get("long", 0) for count in counts] == [0, 20, 0, 20]
    runner.run()


def test_short_prompts_do_not_take_the_blocks_that_an_older_prompt_waits_for() -> None:
    """Otherwise a stream of short prompts would starve a long one."""
    brain = scheduler(blocks=20, block_size=4, max_step_tokens=64)
    runner = SlotRunner(brain)
    brain.add(sequence("first", [1] * 40, max_tokens=3))
    runner.step()
    brain.add(sequence("long", [2] * 60, arrival=1, max_tokens=1))
    for number in range(8):
        brain.add(sequence(f"{number}", [3 + number] * 4, arrival=2 + number, max_tokens=1))
    joined = [set(amounts(plan)) - {"first"} for plan in runner.run()]
    assert "long" in next(names for names in joined if names)


def test_a_followup_whose_conversation_is_cached_counts_as_short() -> None:
    brain = scheduler(blocks=400, max_step_tokens=64)
    runner = SlotRunner(brain)
    brain.add(sequence("turn 1", [3] * 400, max_tokens=1))
    runner.run()
    brain.add(sequence("long", [7] * 600, arrival=1, max_tokens=1))
    runner.step()
    brain.add(sequence("turn 2", [*[3] * 400, 5, 6], arrival=2, max_tokens=1))
    counts = amounts(runner.step())
    assert 0 < counts["turn 2"] < 16
    assert counts["long"] >= 16
    runner.run()


def test_clients_take_turns() -> None:
    """One client with many prompts once held up another client until all of them were computed."""
    brain = scheduler(blocks=400, max_step_tokens=64)
    runner = SlotRunner(brain)
    for number in range(6):
        brain.add(sequence(f"a{number}", [number] * 64, arrival=number, max_tokens=1, client="a"))
    for number in range(2):
        brain.add(sequence(f"b{number}", [50 + number] * 64, arrival=10 + number, max_tokens=1, client="b"))
    order = [next(iter(amounts(plan))) for plan in runner.run()]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]
    # A client that was away has no claim on the time in which it was.
    for number in range(3):
        brain.add(sequence(f"c{number}", [80 + number] * 64, arrival=20 + number, max_tokens=1, client="c"))
    runner.step()
    brain.add(sequence("b2", [90] * 64, arrival=30, max_tokens=1, client="b"))
    brain.add(sequence("b3", [91] * 64, arrival=31, max_tokens=1, client="b"))
    assert [next(iter(amounts(plan))) for plan in runner.run()] == ["c1", "b2", "c2", "b3"]


def test_a_key_gets_no_more_turns_by_naming_many_clients() -> None:
    brain = scheduler(blocks=400, max_step_tokens=64)
    runner = SlotRunner(brain)
    for number in range(4):
        many = sequence(f"a{number}", [number] * 64, arrival=number, max_tokens=1)
        many.client = ("a", f"tenant {number % 3}")
        brain.add(many)
    for number in range(3):
        brain.add(sequence(f"b{number}", [50 + number] * 64, arrival=10 + number, max_tokens=1, client="b"))
    order = [next(iter(amounts(plan))) for plan in runner.run()]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_policies_with_an_order_of_their_own_keep_it(policy: str) -> None:
    brain = scheduler(blocks=400, max_step_tokens=64, policy=policy)
    runner = SlotRunner(brain)
    brain.add(sequence("long", [7] * 128, max_tokens=1, client="a"))
    brain.add(sequence("later", [8] * 128, arrival=1, max_tokens=1, client="a"))
    brain.add(sequence("short", [5] * 20, arrival=2, max_tokens=1, client="b"))
    seqs = list(brain.waiting)
    order = [name for plan in runner.run() for name in amounts(plan)]
    assert list(dict.fromkeys(order)) == ["long", "later", "short"]
    assert all(seq.output_ids == answer(seq) for seq in seqs)
