"""The planner's check on a tiny engine: what is played, what is recorded, and what is predicted of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fovea.cli.plan.check import Compared, Figures, common_tokens, compare, fitted_cost, play, predict
from fovea.engine.simulate.executor import recorded_steps
from fovea.planner.cost import CostModel
from fovea.planner.fit import Preparation, fit_preparation
from fovea.planner.sessions import Turn
from tests.support.checkpoints import write
from tests.support.engines import assert_idle, engine

CLIENTS = (
    (Turn(12, 5, ("cat", 96, 64)), Turn(6, 4, continues=True)),
    (Turn(30, 6), Turn(9, 3, ("cat", 96, 64))),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL."""
    return write("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def test_sessions_are_played_recorded_and_predicted(folder: Path) -> None:
    with engine(folder) as machine:
        model = machine.runner.model
        with recorded_steps(machine.loop, model) as record:
            played = asyncio.run(play(machine, CLIENTS, nonce=1))
        assert "execute" not in vars(machine.loop.stepper.executor)
        assert "encode_slices" not in vars(model)
        assert_idle(machine)
        config, common = machine.config, common_tokens(machine)
        cost = fitted_cost(machine, record)
    answers = [[len(one.tokens) for one in client] for client in played]
    assert answers == [[5, 4], [6, 3]]
    # Each token of an answer but the first was a decode; drafts and repetitions would make more.
    assert sum(sample.made_of.decodes for sample in record.steps) == sum(map(sum, answers)) - 4
    assert len(record.images) == 1
    assert record.images[0].visual_tokens == played[0][0].visual
    assert record.images[0].slices >= 1
    # The follow-up holds the first question, its answer and the image again.
    assert played[0][1].prompt > played[0][0].prompt + 5
    assert played[0][1].visual == played[0][0].visual == played[1][1].visual
    assert common > 0
    figures = predict(played, config, cost, Preparation(0.0, 0.0, 0.0), common)
    assert figures.ttft_s > 0
    assert figures.itl_s > 0
    assert figures.tokens_per_s > 0


def test_a_record_is_closed_also_after_an_error(folder: Path) -> None:
    with engine(folder) as machine:
        with pytest.raises(ValueError, match="stop"), recorded_steps(machine.loop, machine.runner.model):
            raise ValueError("stop")
        assert "execute" not in vars(machine.loop.stepper.executor)


def test_figures_of_answers() -> None:
    figures = Figures.of([(0.0, [1.0, 1.5, 2.0]), (1.0, [2.0, 4.0])])
    assert figures == Figures(ttft_s=1.0, itl_s=1.0, tokens_per_s=5 / 4)
    assert Figures.middle([figures, Figures(3.0, 3.0, 3.0), Figures(2.0, 0.5, 9.0)]) == Figures(2.0, 1.0, 3.0)


def test_the_error_is_that_of_the_prediction_and_the_worst_counts() -> None:
    one = Compared("text", Figures(1.1, 1.0, 80.0), Figures(1.0, 1.0, 100.0), fitted=False)
    assert one.error("ttft_s") == pytest.approx(0.1)
    assert one.error("tokens_per_s") == pytest.approx(-0.2)
    assert one.worst == pytest.approx(0.2)


def test_preparation_is_fitted_to_tokens_and_pixels() -> None:
    truth = Preparation(0.001, 2e-6, 3e-8)
    seen = [
        (prompt, pixels, truth.seconds(prompt, pixels))
        for prompt in (10, 100, 900)
        for pixels in (0, 50_000, 400_000)
    ]
    found = fit_preparation(seen)
    assert found.seconds(500, 200_000) == pytest.approx(truth.seconds(500, 200_000), rel=1e-3)


def test_a_prediction_with_the_true_costs_is_the_simulation_itself(folder: Path) -> None:
    """Comparing calls everything that the command calls, with an engine whose speed no test relies on."""
    with engine(folder) as machine:
        asyncio.run(play(machine, CLIENTS, nonce=3))
        result = compare(machine, "follow-ups", CostModel(), Preparation(0.0, 0.0, 0.0), repeats=1)
    assert result.name == "follow-ups"
    assert not result.fitted
    assert result.measured.tokens_per_s > 0
