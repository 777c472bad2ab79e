"""Speculation with random weights in the shape of a 0.5 B Qwen2.5-VL, with drafts of a chosen acceptance.

Random weights give texts that no drafter can expect, so an oracle drafts (oracle_drafts.py). Four engines
share the weights: without speculation; with the oracle, and the engine's own choice of how many drafts are
worth their rows; with the oracle, all of whose drafts are computed; and with an oracle that is nearly always
wrong, but claims to be right.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

from checkpoint import write_checkpoint
from engines import text_prompt
from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.engine.schedule.draft_budget import DraftBudget
from fovea.engine.sequence import Drafts, Sequence
from fovea.engine.speculate.speculator import DraftRequest
from fovea.planner.option import speculation
from oracle_drafts import Oracle, chance_for
from speculation_runs import OFF, Answer, Differs, Engines, ask, crowds, of_medians, rotated

BUDGET, EVERY, BAD = "budget", "every", "bad"
TOKENS_PER_STEP = (1.5, 1.8, 2.6)
DRAFTS = (3, 5)
ROWS = (1, 2, 4, 6, 8, 16)
STEPS = 24
"""Steps that are timed with each number of rows."""
STREAMS = 8
BAD_CHANCE, BAD_CLAIM = 0.1, 0.9
PROMPT = "Tell me more about it."


class EveryDraft(DraftBudget):
    """A budget that leaves all drafts, to time them."""

    def choose(self, sequences: Iterable[Sequence]) -> None:
        """Leave the drafts as they are."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything with the large model. Raises Differs."""
    exact = args.shape != "tiny"
    folder = write_checkpoint(args.folder, shape=args.shape)
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "kv_cache_mib": 256, "threads": args.threads,
        "max_draft_tokens": max(ROWS), "max_queue": 0,
    }  # fmt: skip
    drafters = dict.fromkeys((BUDGET, EVERY, BAD), "prompt")
    own = {"speculative_tokens": max(ROWS) - 1}
    with Engines(str(folder), drafters, own, **settings) as found:
        oracles = {name: _use_oracle(found[name]) for name in drafters}
        _compute_every_draft(found[EVERY], oracles[EVERY])
        rows = _row_costs(found, oracles[EVERY], args.large_repeats, exact)
        print("large: rows are timed", file=sys.stderr, flush=True)
        streams = _one_stream(found, oracles, args.large_tokens, args.large_repeats, exact)
        print("large: one stream is timed", file=sys.stderr, flush=True)
        result = {
            "repeats": args.large_repeats,
            "tokens": args.large_tokens,
            "rows_ms": rows,
            "one": streams,
            "planned": _planned(rows, streams),
            "crowd": _crowd(found, oracles[BAD], args.large_tokens, args.large_crowd_repeats, exact),
        }
    return result


def _use_oracle(engine: Engine) -> Oracle:
    """Replace the drafters of an engine by an oracle."""
    speculator = engine.parts.speculator
    assert speculator is not None
    oracle = Oracle()
    speculator.drafters = (oracle,)
    return oracle


def _compute_every_draft(engine: Engine, oracle: Oracle) -> None:
    """Compute all drafts of an oracle, whatever they cost and however often they were wrong."""

    def propose(asked: Seq[DraftRequest]) -> dict[str, Drafts]:
        found = {
            each.seq.id: oracle.draft(each.seq, [*each.seq.output_ids, *each.new], oracle.drafts).tokens
            for each in asked
        }
        return {name: Drafts(tokens, [1.0] * len(tokens), 0, oracle.name) for name, tokens in found.items()}

    engine.loop.stepper.drafts = EveryDraft(engine.loop.stepper.times)
    speculator = engine.parts.speculator
    assert speculator is not None
    speculator.propose = propose  # type: ignore[method-assign]


def _ask(engine: Engine, prompt: ChatPrompt, tokens: int) -> Answer:
    return ask(engine, prompt, max_tokens=tokens, ignore_eos=True)[0]


def _teach(found: Engines, oracles: Iterable[Oracle], prompt: ChatPrompt, tokens: int) -> Answer:
    """Ask the engine without speculation, and tell the oracles its answer."""
    answer = _ask(found[OFF], prompt, tokens)
    ids = tuple(found[OFF].outline(prompt).ids)
    for oracle in oracles:
        oracle.answers[ids] = list(answer.tokens)
    return answer


def _check(answer: Answer, expected: Answer, what: str, exact: bool) -> None:
    """Raise Differs unless an answer is the beginning of the expected one.

    exact: so are the log probabilities. They are not with the tiny model of --quick: the C++ kernels do not
    have the attention of its heads, and torch's adds in an order that depends on the number of rows.
    """
    count = len(answer.tokens)
    same = answer.logprobs == expected.logprobs[:count] or not exact
    if answer.tokens != expected.tokens[:count] or not same:
        raise Differs(f"large, {what}: an answer differs from that of {OFF}")


def _row_costs(found: Engines, oracle: Oracle, repeats: int, exact: bool) -> dict[str, float]:
    """Return the milliseconds of a step with so many rows of one answer; `off`: without speculation."""
    prompt = text_prompt(PROMPT)
    expected = _teach(found, [oracle], prompt, max(ROWS) * STEPS + 1)
    times: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        for name in rotated([OFF, *map(str, ROWS)], repeat):
            rows = 1 if name == OFF else int(name)
            oracle.chance, oracle.drafts = 1.0, rows - 1
            answer = _ask(found[OFF if name == OFF else EVERY], prompt, rows * STEPS + 1)
            _check(answer, expected, f"{name} rows", exact)
            if repeat:
                times.setdefault(name, []).append(1000 * answer.decode_s / answer.steps)
    return {name: statistics.median(times[name]) for name in (OFF, *map(str, ROWS))}


def _one_stream(
    found: Engines, oracles: dict[str, Oracle], tokens: int, repeats: int, exact: bool
) -> list[dict[str, Any]]:
    """Return tokens per step and speed of one stream for each acceptance and number of drafts."""
    prompt = text_prompt(PROMPT + " Please.")
    expected = _teach(found, [oracles[BUDGET], oracles[EVERY]], prompt, tokens)
    rates: dict[Any, list[float]] = {}
    counts: dict[Any, list[int]] = {}
    cells = [(drafts, goal) for drafts in DRAFTS for goal in TOKENS_PER_STEP]
    order = [(name, *cell) for cell in cells for name in (OFF, BUDGET, EVERY)]
    for drafts in DRAFTS:  # the engine learns what rows cost
        oracles[BUDGET].drafts, oracles[BUDGET].chance = drafts, 1.0
        _ask(found[BUDGET], prompt, tokens)
    for repeat in range(repeats):
        for name, drafts, goal in rotated(order, 3 * repeat):
            if name in oracles:
                oracles[name].drafts, oracles[name].chance = drafts, chance_for(goal, drafts)
            answer = _ask(found[name], prompt, tokens)
            _check(answer, expected, f"{name} with {drafts} drafts", exact)
            rates.setdefault((name, drafts, goal), []).append((tokens - 1) / answer.decode_s)
            count = counts.setdefault((name, drafts, goal), [0, 0])
            count[0] += tokens - 1
            count[1] += answer.steps
    return [
        {
            "drafts": drafts,
            "goal": goal,
            "off_tokens_per_s": statistics.median(rates[OFF, drafts, goal]),
            **{
                name: {
                    "tokens_per_step": counts[name, drafts, goal][0] / counts[name, drafts, goal][1],
                    "tokens_per_s": statistics.median(rates[name, drafts, goal]),
                    "speed": of_medians(rates[name, drafts, goal], rates[OFF, drafts, goal])._asdict(),
                }
                for name in (BUDGET, EVERY)
            },
        }
        for drafts, goal in cells
    ]


def _planned(rows: dict[str, float], streams: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Compare the planner's formula with what was measured where all drafts are computed.

    The acceptance is that with which the formula yields the measured tokens per step.
    """
    planned = []
    for cell in streams:
        drafts, measured = cell["drafts"], cell[EVERY]
        chance = chance_for(measured["tokens_per_step"], drafts)
        verify_s, step_s = rows[str(drafts + 1)] / 1000, rows[OFF] / 1000
        predicted = speculation(drafts, chance, verify_s, step_s, 0.0).speedup
        planned.append(
            {
                "drafts": drafts,
                "acceptance": chance,
                "tokens_per_step": measured["tokens_per_step"],
                "predicted": predicted,
                "measured": measured["speed"]["value"],
            }
        )
    return planned


def _crowd(found: Engines, oracle: Oracle, tokens: int, repeats: int, exact: bool) -> dict[str, Any]:
    """Time streams at once whose drafts are nearly always wrong."""
    prompts = [text_prompt(f"{PROMPT} This is question {number}.") for number in range(STREAMS)]
    # The oracle learns the answers in the first round, which does not count.
    oracle.drafts, oracle.chance, oracle.claim = max(DRAFTS), BAD_CHANCE, BAD_CLAIM
    requests = [(prompt, {"max_tokens": tokens, "ignore_eos": True}) for prompt in prompts]
    before = found[BAD].stats()["draft_tokens"]
    rates = crowds(found, requests, STREAMS, repeats, (OFF, BAD), exact=exact)
    return {
        "streams": STREAMS,
        "rates": rates,
        "ratio": of_medians(rates[BAD], rates[OFF])._asdict(),
        "drafts": found[BAD].stats()["draft_tokens"] - before,
    }
