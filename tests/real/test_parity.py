"""Numbers of pretrained decoders equal those of transformers in float32, in short and in long contexts."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest

from fovea import Engine
from fovea.core.types import Completion, TextPrompt, TokenPrompt
from fovea.engine.request.inputs import to_prompt
from fovea.evaluation.perplexity import Perplexity, pieces
from tests.real.conftest import TEXT, Decoder, Reference

QUESTIONS = (
    "What is the capital of France?",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
BEGINNINGS = (
    "The three largest cities of Italy are",
    "In 1969, the first human beings",
    "def quicksort(items):\n",
)
TOKENS = 128
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places, by the order of additions alone."""
LOGPROB = 2e-3
"""Bound for log-probabilities of tokens in float32. Most differ by 1e-5; unlikely ones by more."""
NEEDLE = "The secret number of the lighthouse in Bergen is 48213."
LONG = 8192
"""SmolLM2's own limit of prompt and answer."""


def prompts(decoder: Decoder, engine: Engine) -> list[list[int]]:
    """Tokens of conversations for the model that was trained for them, and of beginnings for the other."""
    if engine.tokenizer.has_template:
        return [list(engine.outline(to_prompt(text)).ids) for text in QUESTIONS]
    return [[*engine.tokenizer.start_ids, *engine.tokenizer.encode_plain(text)] for text in BEGINNINGS]


def generate(engine: Engine, ids: list[int], count: int, **options: Any) -> Completion:
    given = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "logprobs": True, **options}
    return engine.generate(TokenPrompt(tuple(ids)), **given)


def assert_answers_equal(reference: Reference, ids: list[int], answer: Completion) -> float:
    """Assert that all tokens are the reference's best ones, or tie. Returns the largest difference."""
    tokens = list(answer.token_ids[0])
    worst = 0.0
    rows = reference.rows([*ids, *tokens], first=len(ids) - 1)
    for (place, row), entry in zip(rows, answer.logprobs[0], strict=True):
        assert entry.logprob is not None
        assert float(row.max() - row[entry.id]) < TIE, f"token {place - len(ids)} is not the best one"
        worst = max(worst, abs(float(row[entry.id]) - entry.logprob))
    assert worst < LOGPROB
    return worst


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_greedy_answers_and_their_log_probabilities(name: str, request: pytest.FixtureRequest) -> None:
    """128 greedy tokens of three prompts, and transformers' own generation of the first of them."""
    decoder: Decoder = request.getfixturevalue(name)
    with decoder.engine() as engine:
        asked = prompts(decoder, engine)
        answers = [generate(engine, ids, TOKENS) for ids in asked]
    worst = max(
        assert_answers_equal(decoder.reference, ids, answer)
        for ids, answer in zip(asked, answers, strict=True)
    )
    theirs = decoder.reference.greedy(asked[0], TOKENS)
    equal = sum(a == b for a, b in zip(answers[0].token_ids[0], theirs, strict=True))
    print(
        f"\n{decoder.name}: largest difference of log-probabilities of 3 answers {worst:.1e}; "
        f"{equal} of {TOKENS} tokens equal transformers' own generation"
    )
    assert equal == TOKENS


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_perplexity_equals_that_of_transformers_to_four_digits(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The specification of debconf, in pieces of 1,024 tokens; every log-probability is compared as well."""
    decoder: Decoder = request.getfixturevalue(name)
    start = decoder.loaded.tokenizer.start_ids
    parts = list(pieces(decoder.text[len(start) :], start, 1024))
    with decoder.engine() as engine:
        scored = [generate(engine, list(part), 1, prompt_logprobs=0).prompt_logprobs for part in parts]
    theirs = [decoder.reference.logprobs(list(part)) for part in parts]
    ours = [[entry.logprob for entry in piece if entry is not None] for piece in scored]
    found = Perplexity.of(scored, len(TEXT.read_bytes()))
    expected = math.exp(-math.fsum(map(math.fsum, theirs)) / sum(map(len, theirs)))
    worst = max(
        abs(a - b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one[-len(other) :], other, strict=True)
        if a is not None
    )
    print(
        f"\n{decoder.name}: perplexity {found.perplexity:.4f}, transformers {expected:.4f}, "
        f"{found.tokens} tokens; largest difference of a log-probability {worst:.1e}"
    )
    assert found.tokens == sum(map(len, theirs))
    assert found.perplexity == pytest.approx(expected, rel=5e-5)
    assert worst < LOGPROB


def test_windows_and_both_rotary_bases_of_gemma_in_a_context_of_three_windows(gemma: Decoder) -> None:
    """Log-probabilities equal transformers' past 512 tokens, and would not with another window or base."""
    ids = list(gemma.text[:1600])
    first = 1024
    with gemma.engine() as engine:
        scored = generate(engine, ids, 1, prompt_logprobs=0).prompt_logprobs
    ours = [entry.logprob for entry in scored[first + 1 :] if entry is not None and entry.logprob is not None]

    def distance(reference: Reference) -> float:
        theirs = reference.logprobs(ids, first)
        assert len(theirs) == len(ours)
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

    config = gemma.reference.model.config
    local, whole = deepcopy(config.rope_parameters), deepcopy(config.rope_parameters)
    local["sliding_attention"]["rope_theta"] = 1000000.0
    whole["full_attention"]["rope_theta"] = 10000.0
    others = {
        "a window of 1,024": {"sliding_window": 1024},
        "one base for the windows": {"rope_parameters": local},
        "one base for all tokens": {"rope_parameters": whole},
    }
    found = {name: distance(Reference(gemma.folder, **change)) for name, change in others.items()}
    own = distance(gemma.reference)
    print(f"\ngemma3-270m after token 1,024: {own:.1e}; with {found}")
    assert own < LOGPROB
    assert min(found.values()) > 0.1, "the text does not tell these apart"


def test_a_needle_in_8192_tokens(smollm2: Decoder) -> None:
    """The prompt fills SmolLM2's context. Fovea's answer is transformers', and the number is found."""
    with smollm2.engine() as engine:
        tokenizer = engine.tokenizer
        needle = tokenizer.encode_plain(f"\n\n{NEEDLE}\n\n")
        question = tokenizer.encode_plain("\n\nThe secret number of the lighthouse in Bergen is")
        answer_room = 16
        filler = list(smollm2.text) * 2
        room = LONG - answer_room - len(needle) - len(question)
        ids = [*filler[: room // 3], *needle, *filler[room // 3 : room], *question]
        assert len(ids) == LONG - answer_room
        answer = generate(engine, ids, answer_room)
        text = engine.tokenizer.decode(answer.token_ids[0])
        with pytest.raises(Exception, match="8192"):
            generate(engine, ids, answer_room + 1)
    worst = assert_answers_equal(smollm2.reference, ids, answer)
    print(f"\nsmollm2 after {len(ids)} tokens: {text!r}; largest difference {worst:.1e}")
    assert "48213" in text


def test_text_in_many_scripts_survives_the_tokenizers(smollm2: Decoder, gemma: Decoder) -> None:
    text = "Grüße, Ελλάδα, Київ, 東京タワー, مرحبا, नमस्ते 👩‍🚀  \t tabs\n\n\nlines <b>&amp;</b> ``code``"
    for decoder in (smollm2, gemma):
        with decoder.engine() as engine:
            ids = engine.outline(TextPrompt(text)).ids
            start = list(engine.tokenizer.start_ids)
            assert list(ids[: len(start)]) == start
            assert engine.tokenizer.decode(ids[len(start) :]) == text
