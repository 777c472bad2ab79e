"""Numbers of llama.cpp for the same GGUF files: how far they agree, within what its arithmetic explains.

llama.cpp multiplies weights of 4 bits with activations that it rounds to 8 bits, and keeps KV in float16.
Fovea has the same weights in float32. So tokens need not be equal, and log-probabilities differ a little.
"""

from __future__ import annotations

import numpy as np
import pytest

from fovea.core.types import TokenPrompt
from tests.real.conftest import Decoder
from tests.support import real_models

TOKENS = 256
MEAN, LARGEST = 0.15, 2.5
"""Bounds for the difference of log-probabilities of the text's tokens: the mean, and the largest one."""


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_log_probabilities_of_a_text_and_best_tokens(name: str, request: pytest.FixtureRequest) -> None:
    """Compare 256 tokens of the text: their log-probabilities, and the most likely token of each place."""
    from llama_cpp import Llama

    decoder: Decoder = request.getfixturevalue(name)
    ids = list(decoder.text[:TOKENS])
    llama = Llama(
        str(real_models.gguf_file(decoder.name)),
        n_ctx=512,
        n_batch=512,
        logits_all=True,
        verbose=False,
        n_threads=2,
    )
    tokenizer = decoder.loaded.tokenizer
    start = bool(tokenizer.start_ids)
    own = llama.tokenize(tokenizer.decode(ids[:64]).encode(), add_bos=start, special=True)
    same = sum(a == b for a, b in zip(own, ids, strict=False))
    print(f"\n{decoder.name}: llama.cpp's tokenizer cuts {same} of 64 tokens alike")
    llama.eval(ids)
    logits = np.array(llama.scores[:TOKENS], np.float64)
    logits -= logits.max(-1, keepdims=True)
    theirs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    with decoder.engine() as engine:
        answer = engine.generate(TokenPrompt(tuple(ids)), max_tokens=1, temperature=0, prompt_logprobs=1)
    differences, best = [], 0
    for place, entry in enumerate(answer.prompt_logprobs):
        if entry is not None and entry.logprob is not None:
            differences.append(abs(entry.logprob - theirs[place - 1, entry.id]))
            best += entry.top[0][0] == int(theirs[place - 1].argmax())
    mean, worst = float(np.mean(differences)), float(np.max(differences))
    print(
        f"{decoder.name} beside llama.cpp: best token equal at {best} of {len(differences)} places; "
        f"log-probabilities differ by {mean:.3f} in the mean, {worst:.2f} at most"
    )
    assert best > 0.9 * len(differences)
    assert mean < MEAN
    assert worst < LARGEST
