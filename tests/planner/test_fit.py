"""The fit of a cost model finds the parameters behind noisy measurements."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fovea.core.errors import ConfigError
from fovea.planner.cost import Composition, CostModel
from fovea.planner.fit import ImageSample, StepSample, fit_images, fit_steps, image_error, step_error


def test_a_fit_finds_what_made_the_figures_despite_noise() -> None:
    truth = CostModel(step_s=3e-4, decode_s=6e-5, context_s=4e-7, token_s=3e-5, chunk_s=5e-4, pair_s=4e-8)
    random = Random(5)
    seen = []
    for _ in range(3000):
        decodes, chunks = random.randint(0, 16), random.randint(0, 3)
        tokens = chunks * random.choice([16, 64, 300, 1000])
        context = random.randint(20, 1000)
        made_of = Composition(decodes, decodes * context, tokens, chunks, tokens * random.randint(8, 900))
        if made_of:
            slow = 3.0 if random.random() < 0.05 else random.uniform(0.9, 1.1)
            seen.append(StepSample(made_of, truth.step(made_of) * slow))
    found = fit_steps(seen)
    for name, value in found.items():
        assert value == pytest.approx(getattr(truth, name), rel=0.08), name
    assert step_error(replace(truth, **found), seen).median < 0.07


def test_a_fit_of_images_knows_their_slices() -> None:
    truth = CostModel(image_s=1e-3, visual_s=1e-4, visual_pair_s=2e-7, slice_s=2e-3)
    seen = [ImageSample(v, truth.slices(v), truth.image(v)) for v in (16, 64, 144, 256, 576, 1024)]
    cost = replace(truth, **fit_images(seen))
    assert image_error(cost, seen).p90 < 1e-6
    assert cost.slice_s == pytest.approx(2e-3, rel=0.15)


def test_no_parameter_is_fitted_below_zero() -> None:
    falling = [StepSample(Composition(n, n * 10), 0.01 - n * 1e-4) for n in range(1, 30)]
    assert all(value >= 0 for value in fit_steps(falling).values())


def test_nothing_seen_is_told() -> None:
    with pytest.raises(ConfigError, match="no image was seen"):
        fit_images([])
