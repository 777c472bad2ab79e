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

from fovea.core.media import PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.load import LoadedModel, load_model
from fovea.engine.models.base import value_tensor
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.regions.any_size import RelevanceModel
from fovea.engine.regions.encoder import word_embeddings
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.encoding import run_to_end
from fovea.engine.vision.processor.base import Reduction
from fovea.engine.vision.processor.pixels import picture, resize
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.visual_budget.choose import QUESTION_IDS
from fovea.engine.visual_budget.methods import keep_count
from fovea.evaluation.datasets import Case
from fovea.relevance.pipeline import Realization, survey
from fovea.relevance.policy import Allocation, attend, first_view
from fovea.relevance.realizing import View, patch_fractions, whole
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
    pixels = np.ascontiguousarray(resize(picture(image), height, width, processor.resample))
    total = keep_count(plan.tokens, keep)
    question = case.exchanges[0].question
    words = tuple(loaded.tokenizer.encode(question)[-QUESTION_IDS:])
    reduction = Reduction("relevance", plan.tokens, "whole", "key", question=question, word_ids=words)
    judge = RelevanceModel(partial(word_embeddings, loaded.model), loaded.relevance)
    surveyed, survey_s = _timed(partial(survey, pixels, processor.factor))
    tensions, tensions_s = _timed(partial(judge.tensions, surveyed, reduction, total))
    shape = first_view(surveyed.grid, total, tensions.compress)
    features, view_s = _timed(partial(_encode_first_view, loaded, processor, pixels, surveyed.grid, shape))

    def choose(worth: Any, held: Any, total: int) -> Allocation:
        return attend(worth, held, total, tensions.compress)

    def decide() -> Realization:
        participatory = judge.couple(surveyed, reduction, shape, features)
        return judge.realize(surveyed, reduction, total, tensions, participatory, choose)

    _, planning_s = _timed(decide)
    return Cost(survey_s, view_s, tensions_s + planning_s)


def _encode_first_view(
    loaded: LoadedModel, processor: QwenProcessor, pixels: Any, grid: tuple[int, int], shape: tuple[int, int]
) -> torch.Tensor:
    model = loaded.model
    assert isinstance(model, QwenVL)
    merge = model.vision.config.merge
    size = shape[1] * processor.factor, shape[0] * processor.factor
    small = np.asarray(PIL.Image.fromarray(pixels).resize(size, processor.resample))
    patches = value_tensor(processor.patches(small)).to(model.device, model.dtype)
    at = patch_fractions(View(whole(*grid), shape, ()), grid, merge)
    embeds, _ = run_to_end(model.vision.slices(patches, (1, shape[0] * merge, shape[1] * merge), at))
    return embeds


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
