"""Properties that every method of token reduction must have."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.errors import EngineError, InvalidRequest
from fovea.engine.reduce.base import ReducedTokens, ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.visual_budget.methods import METHODS
from tests.support.reduction import reduction_input
from tests.support.thorough import examples

NAMES = [name for name, method in METHODS.items() if method.kind == "encoder"]
every_method = pytest.mark.parametrize("name", NAMES)


def same(one: ReducedTokens, other: ReducedTokens) -> bool:
    return torch.equal(one.index, other.index) and torch.equal(one.embeds, other.embeds)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ReductionInput, int]:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    keep = draw(st.integers(1, rows * columns))
    return reduction_input(rows, columns, draw(st.integers(0, 5)), width=draw(st.sampled_from((3, 12)))), keep


@every_method
@given(cases())
@settings(deadline=None, max_examples=examples(60))
def test_the_exact_number_of_tokens_each_once_in_order(name: str, case: tuple[ReductionInput, int]) -> None:
    image, keep = case
    output = reducer(name).reduce(image, keep)
    numbers = output.index.tolist()
    assert output.index.dtype is torch.int64
    assert numbers == sorted(set(numbers))
    assert len(numbers) == keep
    assert 0 <= numbers[0] <= numbers[-1] < image.count
    assert output.embeds.shape == (keep, image.embeds.shape[1])
    assert output.embeds.isfinite().all()
    if not METHODS[name].merges:
        assert output.members is None
        assert torch.equal(output.embeds, image.embeds[output.index])


@every_method
def test_keeping_all_tokens_changes_nothing(name: str) -> None:
    image = reduction_input(4, 5, dtype=torch.bfloat16)
    output = reducer(name).reduce(image, 20)
    assert output.index.tolist() == list(range(20))
    assert output.embeds is image.embeds
    levels = torch.randn(20, 4)
    assert torch.equal(output.gather(levels), levels)


@every_method
def test_a_method_remembers_nothing_between_calls(name: str) -> None:
    method = reducer(name)
    first = method.reduce(reduction_input(6, 7), 17)
    method.reduce(reduction_input(5, 9, seed=3), 11)
    assert same(first, method.reduce(reduction_input(6, 7), 17))


@every_method
def test_types_stay_and_sums_are_float32(name: str) -> None:
    """Equal numbers in bfloat16 and in float32 give equal tokens."""
    coarse = reduction_input(6, 7, dtype=torch.bfloat16)
    fine = replace(
        coarse, embeds=coarse.embeds.float(), query=None if coarse.query is None else coarse.query.float()
    )
    output, exact = reducer(name).reduce(coarse, 17), reducer(name).reduce(fine, 17)
    assert torch.equal(output.index, exact.index)
    assert output.embeds.dtype is torch.bfloat16
    assert torch.equal(output.embeds, exact.embeds.bfloat16())


@every_method
def test_gather_reduces_other_rows_like_the_embeddings(name: str) -> None:
    image = reduction_input(6, 7, dtype=torch.bfloat16)
    output = reducer(name).reduce(image, 17)
    assert torch.equal(output.gather(image.embeds), output.embeds)


@pytest.mark.parametrize("name", [name for name in NAMES if not METHODS[name].query_aware])
def test_query_agnostic_methods_ignore_the_words(name: str) -> None:
    image = reduction_input(6, 7)
    bare = replace(image, query=None, probe=None)
    assert same(reducer(name).reduce(image, 17), reducer(name).reduce(bare, 17))


@pytest.mark.parametrize("name", ["dart", "dpp"])
def test_without_words_a_method_equals_its_agnostic_twin(name: str) -> None:
    image = reduction_input(6, 7)
    none, empty = replace(image, query=None), replace(image, query=image.embeds[:0])
    twin = reducer(name).reduce(image, 17)
    aware = reducer(f"{name}_query")
    assert same(aware.reduce(none, 17), twin)
    assert same(aware.reduce(empty, 17), twin)
    assert not same(aware.reduce(image, 17), twin)


@pytest.mark.parametrize("name", ["dart", "dart_query", "dpp", "dpp_query"])
def test_methods_that_compare_values_ignore_the_order(name: str) -> None:
    """DPP uses places if it knows them. Here the grid is one row, so no places are known."""
    image = replace(reduction_input(6, 7, width=64), grid=(1, 42))
    order = torch.randperm(42, generator=torch.Generator().manual_seed(1))
    shuffled = reducer(name).reduce(replace(image, embeds=image.embeds[order]), 17)
    assert sorted(order[shuffled.index].tolist()) == reducer(name).reduce(image, 17).index.tolist()


def test_impossible_counts() -> None:
    for keep in (0, 21):
        with pytest.raises(EngineError, match=f"dart cannot keep {keep} of 20"):
            reducer("dart").reduce(reduction_input(4, 5), keep)


@pytest.mark.parametrize(
    ("name", "missing"), [("fastv", "probe"), ("dart_k", "probe"), ("visionzip", "attention, keys")]
)
def test_missing_input_is_named(name: str, missing: str) -> None:
    bare = replace(reduction_input(4, 5), probe=None, attention=None, keys=None)
    with pytest.raises(EngineError, match=f"{name} needs the image's {missing}"):
        reducer(name).reduce(bare, 20)


def test_fields_of_another_size_than_the_grid() -> None:
    image = reduction_input(4, 5)
    with pytest.raises(EngineError, match="embeds has 20 rows for a grid of 4x6"):
        replace(image, grid=(4, 6))
    with pytest.raises(EngineError, match="keys has 19 rows"):
        replace(image, keys=torch.zeros(19, 3))


def test_methods_before_the_encoder_have_no_reducer() -> None:
    with pytest.raises(EngineError, match="resize works before the encoder"):
        reducer("resize")
    with pytest.raises(InvalidRequest, match="no method 'half'"):
        reducer("half")
