"""Costs of steps and images, cost files, and the errors for wrong ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import ConfigError
from fovea.engine.schedule.plan import Composition, StepPlan, Work, composition_of
from fovea.planner.cost import CostModel
from tests.support.brains import sequence

ROOT = Path(__file__).resolve().parents[2]


def test_the_composition_of_a_plan_counts_its_work() -> None:
    decoding, prompt = sequence("a", 10), sequence("b", 100)
    decoding.append((1, 2))
    decoding.computed_tokens = 11
    plan = StepPlan((Work(decoding, 11, 1), Work(prompt, 20, 4)))
    # The chunk's tokens attend to 21, 22, 23 and 24 tokens, themselves included.
    assert composition_of(plan) == Composition(1, 12, 4, 1, 21 + 22 + 23 + 24)


def test_a_prompt_of_one_token_is_no_decode() -> None:
    assert composition_of(StepPlan((Work(sequence("a", 1), 0, 1),))) == Composition(0, 0, 1, 1, 1)


def test_two_small_chunks_cost_more_than_one() -> None:
    cost = CostModel()
    one, two = Composition(prompt_tokens=64, chunks=1), Composition(prompt_tokens=64, chunks=2)
    assert cost.step(one) < cost.step(two)


def test_a_step_without_tokens_costs_nothing() -> None:
    assert CostModel().step(Composition()) == 0


def test_slices_add_up_to_an_image() -> None:
    cost = CostModel(image_s=0.002, visual_s=1e-4, visual_pair_s=1e-7, slice_s=0.01)
    assert cost.image(1000) == pytest.approx(0.002 + 0.1 + 0.1)
    assert cost.slices(1000) == 21
    assert cost.slices(1) == 1


def test_a_saved_file_gives_the_same_costs(tmp_path: Path) -> None:
    cost = CostModel(step_s=0.5, made_from="a test")
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        cost.save(tmp_path / "none" / "cost.json")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/costs").glob("*.json")), ids=lambda path: path.stem
)
def test_committed_cost_files_are_read(path: Path) -> None:
    assert CostModel.load(path).made_from != CostModel().made_from


def test_the_built_in_costs_are_those_of_the_bundled_model() -> None:
    fitted = asdict(CostModel.load(ROOT / "benchmarks/costs/fovea-tiny.json"))
    assert asdict(CostModel()) == {**fitted, "made_from": f"built in: {fitted['made_from']}"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": 1}, "unknown parameter 'decode'; did you mean 'decode_s'?"),
        ({"nonsense": 1}, "unknown parameter 'nonsense'; accepted: step_s, decode_s"),
        ({"step_s": 0}, "step_s is 0; accepted: 1e-09 to 1e+12"),
        ({"token_s": "fast"}, "token_s is 'fast'; accepted: 0 to 1e+12"),
        ({"token_s": -1}, "token_s is -1"),
        ({"token_s": True}, "token_s is True"),
        ({"max_context": 1.5}, "max_context is 1.5; accepted: 1 to 1e+12"),
        ({"made_from": 3}, "made_from is 3; accepted: text"),
        ([], "is not an object of JSON"),
    ],
)
def test_the_error_for_a_wrong_file_names_the_file(tmp_path: Path, values: Any, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        CostModel.load(path)
    assert str(path) in raised.value.message
    assert message in raised.value.message


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        CostModel.load(tmp_path / "none.json")
    (tmp_path / "text").write_text("fast")
    with pytest.raises(ConfigError, match="is not JSON"):
        CostModel.load(tmp_path / "text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        CostModel.load(tmp_path / "bytes")
