"""What holds for every method of reduction, whatever it picks by."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.errors import EngineError, InvalidRequest
from fovea.engine.reduce.base import Reduced, Seen
from fovea.engine.reduce.registry import reducer
from fovea.engine.visual_budget.methods import METHODS
from tests.support.seen import seen

NAMES = [name for name, found in METHODS.items() if found.after == "encoder"]
every_method = pytest.mark.parametrize("name", NAMES)


def same(one: Reduced, other: Reduced) -> bool:
    return torch.equal(one.index, other.index) and torch.equal(one.embeds, other.embeds)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Seen, int]:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    keep = draw(st.integers(1, rows * columns))
    return seen(rows, columns, draw(st.integers(0, 5)), width=draw(st.sampled_from((3, 12)))), keep


@every_method
@given(cases())
@settings(deadline=None, max_examples=60)
def test_exactly_as_many_as_wanted_each_once_in_order(name: str, case: tuple[Seen, int]) -> None:
    image, keep = case
    made = reducer(name).reduce(image, keep)
    numbers = made.index.tolist()
    assert made.index.dtype is torch.int64
    assert numbers == sorted(set(numbers))
    assert len(numbers) == keep
    assert 0 <= numbers[0] <= numbers[-1] < image.count
    assert made.embeds.shape == (keep, image.embeds.shape[1])
    assert made.embeds.isfinite().all()
    if not METHODS[name].merges:
        assert made.members is None
        assert torch.equal(made.embeds, image.embeds[made.index])


@every_method
def test_all_of_them_are_handed_on_as_they_are(name: str) -> None:
    image = seen(4, 5, dtype=torch.bfloat16)
    made = reducer(name).reduce(image, 20)
    assert made.index.tolist() == list(range(20))
    assert made.embeds is image.embeds
    levels = torch.randn(20, 4)
    assert torch.equal(made.gather(levels), levels)


@every_method
def test_the_same_again_whatever_came_between(name: str) -> None:
    method = reducer(name)
    first = method.reduce(seen(6, 7), 17)
    method.reduce(seen(5, 9, seed=3), 11)
    assert same(first, method.reduce(seen(6, 7), 17))


@every_method
def test_types_are_kept_and_sums_are_float32(name: str) -> None:
    """The same numbers in bfloat16 and in float32 lead to the same tokens."""
    coarse = seen(6, 7, dtype=torch.bfloat16)
    fine = replace(
        coarse, embeds=coarse.embeds.float(), query=None if coarse.query is None else coarse.query.float()
    )
    made, exact = reducer(name).reduce(coarse, 17), reducer(name).reduce(fine, 17)
    assert torch.equal(made.index, exact.index)
    assert made.embeds.dtype is torch.bfloat16
    assert torch.equal(made.embeds, exact.embeds.bfloat16())


@every_method
def test_other_levels_are_gathered_as_the_embeddings_were(name: str) -> None:
    image = seen(6, 7, dtype=torch.bfloat16)
    made = reducer(name).reduce(image, 17)
    assert torch.equal(made.gather(image.embeds), made.embeds)


@pytest.mark.parametrize("name", [name for name in NAMES if not METHODS[name].query_aware])
def test_what_is_called_query_agnostic_does_not_see_the_words(name: str) -> None:
    image = seen(6, 7)
    bare = replace(image, query=None, probe=None)
    assert same(reducer(name).reduce(image, 17), reducer(name).reduce(bare, 17))


@pytest.mark.parametrize("name", ["dart", "dpp"])
def test_without_words_a_method_does_what_its_agnostic_twin_does(name: str) -> None:
    image = seen(6, 7)
    none, empty = replace(image, query=None), replace(image, query=image.embeds[:0])
    twin = reducer(name).reduce(image, 17)
    aware = reducer(f"{name}_query")
    assert same(aware.reduce(none, 17), twin)
    assert same(aware.reduce(empty, 17), twin)
    assert not same(aware.reduce(image, 17), twin)


@pytest.mark.parametrize("name", ["dart", "dart_query", "dpp", "dpp_query"])
def test_what_looks_at_values_does_not_see_places(name: str) -> None:
    """DPP does where it knows any: here all tokens are one line, as with models that say no more."""
    image = replace(seen(6, 7, width=64), grid=(1, 42))
    order = torch.randperm(42, generator=torch.Generator().manual_seed(1))
    shuffled = reducer(name).reduce(replace(image, embeds=image.embeds[order]), 17)
    assert sorted(order[shuffled.index].tolist()) == reducer(name).reduce(image, 17).index.tolist()


def test_counts_that_can_not_be() -> None:
    for keep in (0, 21):
        with pytest.raises(EngineError, match=f"dart was to keep {keep} of 20"):
            reducer("dart").reduce(seen(4, 5), keep)


@pytest.mark.parametrize(
    ("name", "lacks"), [("fastv", "probe"), ("dart_k", "probe"), ("visionzip", "attention, keys")]
)
def test_what_a_method_was_not_shown_is_named(name: str, lacks: str) -> None:
    bare = replace(seen(4, 5), probe=None, attention=None, keys=None)
    with pytest.raises(EngineError, match=f"{name} was not shown the image's {lacks}"):
        reducer(name).reduce(bare, 20)


def test_rows_that_are_not_the_grids() -> None:
    image = seen(4, 5)
    with pytest.raises(EngineError, match="embeds has 20 rows for a grid of 4x6"):
        replace(image, grid=(4, 6))
    with pytest.raises(EngineError, match="keys has 19 rows"):
        replace(image, keys=torch.zeros(19, 3))


def test_methods_before_the_encoder_reduce_nothing_after_it() -> None:
    with pytest.raises(EngineError, match="resize comes before the encoder"):
        reducer("resize")
    with pytest.raises(InvalidRequest, match="no method 'half'"):
        reducer("half")
