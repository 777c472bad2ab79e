"""SamplingParams checks its values when it is created; an error names the value and the accepted range."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fovea.core.errors import InvalidRequest
from fovea.core.sampling import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"min_p": 1},
        {"repetition_penalty": 10},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(2**63)},
        {"max_tokens": 1, "min_tokens": 1},
        {"n": 16},
        {"logprobs": True, "top_logprobs": 20},
        {"stop": ("x" * 4096,) * 16},
        {"stop_token_ids": tuple(range(64))},
        {"logit_bias": {1: 100.0, 2: -100.0}},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_accepted(params: dict[str, Any]) -> None:
    sampling = SamplingParams(**params)
    assert all(getattr(sampling, name) == value for name, value in params.items())


def test_minus_one_turns_a_parameter_off() -> None:
    """vLLM writes top_k and seed so, llama.cpp max_tokens, and clients of both send it to any server."""
    assert SamplingParams(top_k=-1, seed=-1, max_tokens=-1) == SamplingParams()


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"temperature": -0.1}, "temperature", r"\[0, 2\], got -0.1"),
        ({"temperature": 2.1}, "temperature", r"\[0, 2\]"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": float("inf")}, "temperature", "inf"),
        ({"temperature": True}, "temperature", "True"),
        ({"temperature": "1"}, "temperature", "'1'"),
        ({"top_p": 0}, "top_p", r"\(0, 1\], got 0"),
        ({"top_p": 1.01}, "top_p", r"\(0, 1\]"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"max_tokens": -2}, "max_tokens", "got -2"),
        ({"min_p": 1.5}, "min_p", "got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty", r"\[0.01, 10\], got 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", r"\[0.01, 10\], got 1e-300"),
        ({"repetition_penalty": 10.5}, "repetition_penalty", r"\[0.01, 10\]"),
        ({"presence_penalty": 2.5}, "presence_penalty", "got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "got -2.5"),
        ({"n": 0}, "n", r"\[1, 128\]"),
        ({"n": 129}, "n", "got 129"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"min_tokens": -1}, "min_tokens", "got -1"),
        (
            {"min_tokens": 3, "max_tokens": 2},
            "min_tokens",
            r"min_tokens \(3\) must not exceed max_tokens \(2\)",
        ),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", r"\[0, 20\]"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"seed": 2**63}, "seed", "seed must be in"),
        ({"seed": 10**400}, "seed", r"got 10+\.\.\."),
        ({"stop": ("",)}, "stop", "non-empty"),
        ({"stop": "END"}, "stop", r"takes several strings: \('END',\)"),
        ({"stop": ("x",) * 17}, "stop", "up to 16"),
        ({"stop": ("x" * 4097,)}, "stop", "up to 4096 characters"),
        ({"stop": (5,)}, "stop", "non-empty strings"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids", "up to 64"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias[5]", r"got 101"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "up to 1024"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_out_of_range_is_named(params: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**params)
    assert caught.value.param == field
    assert caught.value.status == 400


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    """It cannot become a float, and Python refuses to write it: both raised other errors."""
    with pytest.raises(InvalidRequest, match="got a number of thousands of digits"):
        SamplingParams(temperature=10**5000)


@pytest.mark.parametrize("name", ["top_k", "n", "max_tokens", "min_tokens", "top_logprobs", "seed"])
def test_a_count_is_a_whole_number(name: str) -> None:
    """A bug: n=2.5 passed the range check and failed later, inside the engine."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{"logprobs": True, name: 2.5})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_sampling_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 9.0  # type: ignore[misc]


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.1, top_k=1).greedy
