"""Log probabilities of prompts are those of transformers, whatever is cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from fovea import Engine
from fovea.core.sampling import SamplingParams
from fovea.core.types import GenerationRequest, PromptLogprobs, TokenPrompt
from fovea.engine.simulate.serving import FOLDER

TEXT = "<|im_start|>user\nHow many red circles are in the image? Answer with a number.<|im_end|>\n" * 3
TOP = 2
POOL: dict[str, Any] = {"device": "cpu", "kv_cache_mib": 16}


def ask(engine: Engine, name: str, ids: list[int], *, scores: int | None) -> tuple[PromptLogprobs, int]:
    """The log probabilities of a prompt, and how many of its tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=scores)
    deltas = list(engine.iterate(GenerationRequest(name, TokenPrompt(tuple(ids)), params)))
    assert all(not delta.prompt_logprobs for delta in deltas[1:])
    return deltas[0].prompt_logprobs, deltas[-1].cached_tokens


def test_log_probabilities_of_a_prompt() -> None:
    """Also in steps of 16 tokens, and of a prompt whose prefix another request has left in the cache."""
    with Engine.from_pretrained(
        "fovea-tiny", dtype="float32", max_step_tokens=16, threads=1, **POOL
    ) as engine:
        ids = engine.tokenizer.encode(TEXT)
        nothing, _ = ask(engine, "without", ids, scores=None)
        first, _ = ask(engine, "first", ids, scores=TOP)
        again, cached = ask(engine, "again", ids, scores=TOP)
        own, _ = ask(engine, "own", ids, scores=0)
        plain, reused = ask(engine, "plain", ids, scores=None)
    assert (nothing, plain) == ((), ())
    assert cached == 0, "the whole prompt is computed"
    assert reused > 0, "the prefix was cached all the time"
    model = hf.AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    for scored in (first, again, own):
        assert len(scored) == len(ids)
        assert scored[0] is None
        for place, entry in enumerate(scored[1:]):
            assert entry is not None
            row = theirs[place]
            assert entry.id == ids[place + 1]
            assert entry.logprob == pytest.approx(row[entry.id].item(), abs=1e-3)
            assert entry.rank == int((row > row[entry.id]).sum()) + 1
            best = row.topk(len(entry.top))
            assert [token for token, _, _ in entry.top] == best.indices.tolist()
            values = [value for _, _, value in entry.top]
            assert values == pytest.approx(best.values.tolist(), abs=1e-3)
            assert len(entry.top) == (0 if scored is own else TOP)
    assert first == again


@pytest.mark.kernels
@pytest.mark.parametrize(
    "step", [pytest.param(16, id="in_pieces"), pytest.param(512, id="in_one_step", marks=pytest.mark.slow)]
)
def test_log_probabilities_of_a_prompt_in_bf16(step: int) -> None:
    """The C++ kernels compute bf16, and in the last layer only the rows that are read, scored ones, too."""
    with Engine.from_pretrained(
        "fovea-tiny", dtype="bfloat16", max_step_tokens=step, threads=1, **POOL
    ) as engine:
        ids = engine.tokenizer.encode(TEXT)
        scored, _ = ask(engine, "scored", ids, scores=0)
    model = hf.AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
    ours = [entry.logprob for entry in scored if entry is not None]
    expected = [theirs[place, token].item() for place, token in enumerate(ids[1:])]
    assert ours == pytest.approx(expected, abs=0.5)
