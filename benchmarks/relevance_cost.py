"""Time the relevance decision for one image at a time: all steps before any region is encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from fovea.core.image import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.regions.encoder import word_embeddings
from fovea.engine.regions.joining import full_grid
from fovea.engine.regions.relevance_model import RelevanceModel
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import Reduction
from fovea.engine.vision.processor.pixels import resize_to_bytes
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.slices import run_to_end
from fovea.engine.visual_budget.choose import QUESTION_IDS
from fovea.engine.visual_budget.methods import keep_count
from fovea.evaluation.datasets import Case
from fovea.relevance.pipeline import Realization, Survey, survey
from fovea.relevance.policy import Allocation, attend, content_mask, first_view, keep_native
from fovea.relevance.realizing import Shape, View, patch_fractions, whole
from fovea.relevance.regions import filled
from relevance_page import Cost

Result = TypeVar("Result")


def measure(name: str, cases: Iterable[Case], keep: float) -> Cost:
    """Time the first image and question of each case; the first case runs twice, once to warm up."""
    loaded = load_model(name, EngineConfig())
    samples = list(cases)
    costs = [_measure_case(loaded, case, keep) for case in (samples[0], *samples)][1:]
    return Cost(*(median(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


@torch.inference_mode()
def _measure_case(loaded: LoadedModel, case: Case, keep: float) -> Cost:
    processor = loaded.processor
    assert isinstance(processor, QwenProcessor)
    image = to_image(case.images[0])
    plan = processor.plan(image.width, image.height, PixelBudget())
    ((height, width),) = plan.sizes
    pixels = np.ascontiguousarray(resize_to_bytes(image, height, width, processor.resample))
    total = keep_count(plan.tokens, keep)
    question = case.exchanges[0].question
    words = tuple(loaded.tokenizer.encode(question)[-QUESTION_IDS:])
    reduction = Reduction("relevance", plan.tokens, "whole", "key", question=question, word_ids=words)
    judge = RelevanceModel(partial(word_embeddings, loaded.model), loaded.relevance)
    surveyed, survey_s = _timed(partial(survey, pixels, processor.factor))
    tensions, tensions_s = _timed(partial(judge.tensions, surveyed, reduction, total))
    shape = first_view(surveyed.grid, total, tensions.compress)
    if judge.reads:
        features, held = read_regions(loaded, processor, pixels, surveyed)

        def decide() -> Realization:
            participatory = judge.read(surveyed, reduction, features, held)
            return judge.realize(surveyed, reduction, total, tensions, participatory, keep_native)

        view_s = 0.0
    else:
        view, view_s = _timed(partial(encode_first_view, loaded, processor, pixels, surveyed.grid, shape))

        def choose(worth: Any, content: Any, tokens: int) -> Allocation:
            return attend(worth, content, tokens, tensions.compress)

        def decide() -> Realization:
            participatory = judge.couple(surveyed, reduction, shape, view)
            return judge.realize(surveyed, reduction, total, tensions, participatory, choose)

    _, planning_s = _timed(decide)
    return Cost(survey_s, view_s, tensions_s + planning_s)


def encode_first_view(
    loaded: LoadedModel, processor: QwenProcessor, pixels: Any, grid: Shape, shape: Shape
) -> torch.Tensor:
    """Tokens of a view of the whole image, (tokens, D)."""
    return encode_view(loaded, processor, pixels, grid, View(whole(*grid), shape, ()))


def read_regions(
    loaded: LoadedModel, processor: QwenProcessor, pixels: Any, surveyed: Survey
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Tokens of all regions with content in their places, (rows, columns, D), and which cells they fill."""
    regions = filled(content_mask(surveyed.propositional, surveyed.perspectival))
    views = (View(region, (region.rows, region.columns), ()) for region in regions)
    encoded = [VisualFeatures(encode_view(loaded, processor, pixels, surveyed.grid, view)) for view in views]
    return full_grid(surveyed.grid, regions, encoded)


def encode_view(
    loaded: LoadedModel, processor: QwenProcessor, pixels: Any, grid: Shape, view: View
) -> torch.Tensor:
    """Tokens of a view of an image, (tokens, D)."""
    model = loaded.model
    assert isinstance(model, QwenVL)
    merge, factor, region = model.vision.config.merge, processor.factor, view.region
    cut = pixels[
        region.row * factor : (region.row + region.rows) * factor,
        region.column * factor : (region.column + region.columns) * factor,
    ]
    size = view.shape[1] * factor, view.shape[0] * factor
    small = np.asarray(PIL.Image.fromarray(cut).resize(size, processor.resample))
    patches = torch.from_numpy(processor.patches(small)).to(model.device, model.dtype)
    at = patch_fractions(view, grid, merge)
    embeds, _ = run_to_end(
        model.vision.slices(patches, (1, view.shape[0] * merge, view.shape[1] * merge), at)
    )
    return embeds


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
