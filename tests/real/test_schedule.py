"""A schedule never changes an answer of a pretrained decoder: cached, batched, cut into pieces, preempted.

The answers have the same bits on the C++ kernels, in bfloat16. In float32 torch computes, whose order of
additions depends on what is computed beside.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import Completion, TokenPrompt
from tests.real.conftest import TEXT, Decoder
from tests.support.engines import all_at_once, assert_idle

TOKENS = 32
LENGTHS = {"smollm2": (300, 420, 250, 350, 40, 120), "gemma3-270m": (700, 540, 40)}
"""Tokens of the prompts, pieces of one text. Gemma's windows have 512."""


def prompts(decoder: Decoder) -> list[TokenPrompt]:
    start = decoder.native.tokenizer.start_ids
    text = decoder.native.tokenizer.encode_plain(TEXT.read_text("utf-8"))
    lengths = enumerate(LENGTHS[decoder.name])
    return [TokenPrompt((*start, *text[at * 500 : at * 500 + count])) for at, count in lengths]


def ask(engine: Engine, prompt: TokenPrompt) -> Completion:
    return engine.generate(
        prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, top_logprobs=2
    )


def together(engine: Engine, asked: list[TokenPrompt]) -> list[Completion]:
    with ThreadPoolExecutor(len(asked)) as pool, all_at_once(engine, len(asked)):
        return list(pool.map(lambda prompt: ask(engine, prompt), asked))


def bits(answers: list[Completion]) -> list[Any]:
    """Tokens and log-probabilities, whose bits must be equal."""
    return [(answer.token_ids, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_tokens_and_log_probabilities_are_the_same_bits_in_every_schedule(
    name: str, request: pytest.FixtureRequest
) -> None:
    decoder: Decoder = request.getfixturevalue(name)
    asked, lengths = prompts(decoder), LENGTHS[decoder.name]
    with decoder.native_engine(prefix_cache=False) as engine:
        truth = bits([ask(engine, prompt) for prompt in asked])
    with decoder.native_engine() as engine:
        cold = together(engine, asked)
        assert bits(cold) == truth, "alone and together"
        warm = together(engine, asked)
        assert bits(warm) == truth, "without and with a cached prefix"
        cached = [answer.usage.cached for answer in warm]
        assert all(count > 0 for count in cached), cached
        print(f"\n{decoder.name}: {sum(cached)} of {sum(lengths)} prompt tokens were cached, same bits")
        assert_idle(engine)
    with decoder.native_engine(max_step_tokens=96) as engine:
        assert bits(together(engine, asked)) == truth, "in steps of 96 tokens"
    tight = sum(-(-count // 16) for count in lengths[:2]) + 1  # two prompts, but not their answers
    with decoder.native_engine(kv_blocks=tight, max_step_tokens=256, prefix_cache=False) as engine:
        assert bits(together(engine, asked)) == truth, "with preemptions"
        preemptions = engine.stats()["preemptions"]
        print(f"{decoder.name}: {preemptions:.0f} preemptions, same bits")
        assert preemptions > 0
        assert_idle(engine)
