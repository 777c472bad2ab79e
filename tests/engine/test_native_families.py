"""Decoders with states, windows and experts on the C++ kernels: bit-identical under any load."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from tests.support.engines import all_at_once, ask, assert_idle, picture
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

PROMPTS = [
    ask("the red circle is left of the blue square"),
    ask("What is in the image?", picture(1)),
    ask("Describe the picture, please.", picture(1)),
    ask("compare", picture(1), picture(3, 64, 128)),
    ask("and here?", picture(4, 224, 192)),
]
FAMILIES = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "gemma3", "gemma4", "mllama")
"""Tiny checkpoints whose heads have 32 numbers. For smaller heads the C++ kernels call those of torch."""
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_step_tokens": 7},
    "no caches": {"prefix_cache": False, "embed_cache_mib": 0, "max_step_tokens": 23},
    "preempted": {"block_size": 4, "kv_blocks": 48, "max_step_tokens": 64},
}
FEW = ("chunks of 7", "preempted")
"""The settings that the default tests try with every family. They try the others with the first one."""
Written = list[tuple[int, float | None]]


def answer(machine: Engine, prompt: ChatPrompt) -> Written:
    done = machine.generate(prompt, temperature=0, max_tokens=24, ignore_eos=True, logprobs=True)
    return [(item.id, item.logprob) for item in done.logprobs[0]]


@pytest.mark.parametrize("family", others_slow(FAMILIES, [n for n in FAMILIES if n != "gemma3"]))
def test_an_answer_has_the_same_bits_alone_and_in_any_company(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    """Tokens and log-probabilities are compared. The answers are longer than the window of Gemma's layers."""
    need_kernels()
    base: dict[str, Any] = {
        "dtype": "bfloat16", "device": "cpu", "threads": 1, "kernels": "native", "kv_blocks": 256,
    }  # fmt: skip
    model = load_model(str(checkpoint(family)), EngineConfig.of(**base))

    def engine(**settings: Any) -> Engine:
        return Engine(model, EngineConfig.of(**{**base, **settings}))

    with engine(prefix_cache=False, embed_cache_mib=0, max_running=1) as machine:
        alone = [answer(machine, prompt) for prompt in PROMPTS]
    assert len({tuple(written) for written in alone}) == len(PROMPTS)
    order = [*range(len(PROMPTS))] * 2
    for name, settings in SETTINGS.items():
        if not is_thorough() and family != FAMILIES[0] and name not in FEW:
            continue
        with engine(**settings) as machine:
            for _ in range(
                2
                if is_thorough()
                or name == "together"
                or family in ("gemma4", "mllama")
                and name != "preempted"
                else 1
            ):
                with ThreadPoolExecutor(len(order)) as pool, all_at_once(machine, len(order)):
                    found = list(pool.map(lambda i: answer(machine, PROMPTS[i]), order))
                assert found == [alone[i] for i in order], name
            if name == "preempted":
                assert machine.stats()["preemptions"] > 0
            assert_idle(machine)


def test_an_answer_computed_again_after_a_preemption_has_the_same_bits(
    checkpoint: Callable[[str], Path],
) -> None:
    """Tokens of an answer are computed again like those of a prompt; its kernels once added in another order.

    With so few blocks every image makes an answer give its blocks back after most of its tokens.
    """
    need_kernels()
    base: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "threads": 1, "kernels": "native"}
    model = load_model(str(checkpoint("gemma3")), EngineConfig.of(**base))
    prompt = PROMPTS[4]
    with Engine(model, EngineConfig.of(**base, prefix_cache=False)) as machine:
        alone = answer(machine, prompt)
    few = EngineConfig.of(**base, block_size=4, kv_blocks=36, max_step_tokens=64)
    for _ in range(4 if is_thorough() else 2):
        with Engine(model, few) as machine:
            with ThreadPoolExecutor(10) as pool, all_at_once(machine, 10):
                found = list(pool.map(lambda i: answer(machine, PROMPTS[i % 5]), range(10)))
            assert machine.stats()["preemptions"] > 0
        assert (found[4], found[9]) == (alone, alone)
