"""On the C++ kernels a token has the same bits however its prompt is cut, cached, repeated or accompanied."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import ChatPrompt, Completion, TokenPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.simulate.serving import FOLDER
from fovea.kernels.native import build
from tests.engine.test_native_families import FAMILIES
from tests.support.amx import amx_twin
from tests.support.engines import all_at_once, ask, assert_idle, picture
from tests.support.programs import need_kernels
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

BASE: dict[str, Any] = {
    "dtype": "bfloat16", "device": "cpu", "threads": 2, "kernels": "native", "kv_blocks": 256,
}  # fmt: skip
COLD: dict[str, Any] = {"prefix_cache": False, "embed_cache_mib": 0, "max_running": 1}
AMX = ("bundled amx", "gemma3 amx", "bundled int8 amx", "mllama amx", "gemma4 amx")
"""Models that are computed by the kernels for AMX, with its operations as plain functions."""
KV = ("bundled kv", "gemma3 kv", "bundled kv amx", "gemma3 kv amx")
"""Models whose keys and values are int8."""
MODELS = ("bundled", "bundled int8", "bundled int4", *FAMILIES, *AMX, *KV)
DEFAULT = ("bundled", "bundled int8", "gemma3", "mllama", *AMX[:2], KV[0])
"""The models of the default run, without those that test_native_families has."""
WORDS = "what the can above this of shape square red circle left blue how many are there"
TOKENS = 12
Request = tuple[ChatPrompt | TokenPrompt, dict[str, Any]]


def run(machine: Engine, request: Request) -> Completion:
    prompt, params = request
    return machine.generate(
        prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, **params
    )


def written(done: Completion) -> list[list[tuple[int, float | None]]]:
    """The tokens and log probabilities of each choice, and of the prompt."""
    prompt = [(item.id, item.logprob) for item in done.prompt_logprobs if item is not None]
    return [*([(item.id, item.logprob) for item in choice] for choice in done.logprobs), prompt]


@pytest.mark.parametrize("chosen", others_slow(MODELS, DEFAULT))
def test_any_cut_of_a_prompt_gives_the_same_bits(
    chosen: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 17 tokens once had another log probability when 16 of them were cached.

    Its last row was then computed like a decode, whose kernel added in another order. So was that of the
    second choice of an answer, and of a prompt that was cut behind its 16th token. And log probabilities of
    prompts were those of other rows: C++ moved the rows that are read as if they ascended.
    """
    if chosen.endswith(" amx"):
        monkeypatch.setattr(build, "chosen", amx_twin)
    need_kernels()
    name, quantization = [*chosen.removesuffix(" amx").split(), "none"][:2]
    types = {"kv_dtype": "int8"} if quantization == "kv" else {"quantization": quantization}
    folder = str(FOLDER) if name == "bundled" else str(checkpoint(name))
    model = load_model(folder, EngineConfig.of(**BASE, **types))

    @contextmanager
    def engine(**settings: Any) -> Iterator[Engine]:
        with Engine(model, EngineConfig.of(**{**BASE, **types, **settings})) as machine:
            yield machine
            assert_idle(machine)

    dice = random.Random(name)
    asked: list[ChatPrompt | TokenPrompt] = [ask("What is in the image?", picture(1))]
    asked.append(ask("Compare.", picture(1), picture(3, 64, 128)))
    with engine(**COLD) as machine:
        ids = asyncio.run(machine.tokenize(ask(" ".join(dice.choices(WORDS.split(), k=80)))))
        starts = range(0, 32, 4)
        asked += [TokenPrompt(tuple(ids[at : at + length])) for at in starts for length in (17, 33)]
        first = run(machine, (asked[2], {})).token_ids[0]
        size = machine.tokenizer.vocab_size  # random models also choose tokens behind it
        turn = TokenPrompt((*ids[:17], *takewhile(lambda token: token < size, first), *ids[:5]))
        requests: list[Request] = [(prompt, {}) for prompt in [*asked, turn]]
        scoring: list[Request] = [(prompt, {"prompt_logprobs": 0}) for prompt in [*asked, turn]]
        alone = [written(run(machine, request)) for request in scoring]
    for round_ in range(8 if is_thorough() else 2):
        pieces = dice.choice((1, 3, 16, 17, 33, 64)) if round_ else 16
        with engine(max_step_tokens=max(pieces, 2)) as machine:
            for request, expected in zip(scoring[:4], alone, strict=False):
                assert written(run(machine, request)) == expected, f"in pieces of {pieces}"
            order = [dice.randrange(len(requests)) for _ in range(16)]
            with ThreadPoolExecutor(len(order)) as pool, all_at_once(machine, len(order)):
                done = list(pool.map(lambda i: run(machine, requests[i]), order))
            for i, answer in zip(order, done, strict=True):
                assert written(answer)[0] == alone[i][0], f"together, in pieces of {pieces}"
            cached = run(machine, requests[-1])
            assert cached.usage.cached > 0 or name != "bundled"
            assert written(cached)[0] == alone[-1][0], "behind an answer that is cached"
            both = written(run(machine, (asked[3], {"n": 2})))
            assert both[0] == both[1] == alone[3][0], "two choices"
