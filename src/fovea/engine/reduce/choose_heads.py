"""Chooses the heads with which a model looks for what a question is about, from pictures without labels.

A head is good if its attention to the image is strong, lies on few tokens, and lies elsewhere if another part
of the image is asked about. The first two are the criteria of "Your Large Vision-Language Model Only Needs A
Few Attention Heads For Visual Grounding" (arXiv 2503.06287); the third leaves out heads that attend to the
same tokens whatever is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import PIL.Image
import torch
from torch import Tensor

from fovea.core.errors import InvalidRequest
from fovea.core.media import Image, PixelBudget
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.look_heads import Head
from fovea.engine.reduce.look import beyond_usual
from fovea.engine.reduce.prompt_run import PromptRun
from fovea.engine.request.inputs import to_image
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.vision.encoding import VisualFeatures, run_to_end
from fovea.engine.vision.processor.base import LookPrompt
from fovea.engine.vision.processor.pixels import picture, resize
from fovea.relevance.policy import look_shape
from fovea.relevance.realizing import Shape

NEAR_BEST = 0.7
"""Heads whose score is at least this share of the best one's are chosen."""
MOST_CHOSEN = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """A picture, and questions about different parts of it; at least two."""

    image: Image
    questions: tuple[str, ...]


@torch.inference_mode()
def score_heads(
    model: VisionLanguageModel, builder: PromptBuilder, subjects: Iterable[Subject]
) -> dict[Head, float]:
    """The score of every head of a model, between 0 and 1: the mean over all subjects.

    Raises InvalidRequest if the model cannot look at images, or if there are no subjects.
    """
    heads = model.decoder.config.look_heads
    totals = torch.zeros(len(heads))
    count = 0
    for subject in subjects:
        view, shape, prompts = _look_at(model, builder, subject)
        ends = [*(prompt.asked for prompt in prompts), prompts[0].neutral]
        run = PromptRun(model, prompts[0].before, view, ends, shape)
        rows = []
        for layer in sorted({layer for layer, _ in heads}):
            run.run(layer)
            rows.append(torch.stack(run.attention(layer)))
        *asked, neutral = torch.cat(rows, dim=1)
        totals += head_scores(torch.stack(asked), neutral).cpu()
        count += 1
    if not count:
        raise InvalidRequest("there are no pictures to choose heads by", param="images")
    return dict(zip(heads, (totals / count).tolist(), strict=True))


def head_scores(asked: Tensor, neutral: Tensor) -> Tensor:
    """The score of each head on one picture, (heads,), between 0 and 1.

    It is the mean over the questions of: attention to the image, times the share of the image beside which
    this attention lies, times how much of it lies elsewhere for the other questions.

    asked: (questions, heads, tokens), attention for each question; neutral: (heads, tokens).
    """
    count = len(asked)
    seen = beyond_usual(asked, neutral)
    shares = seen / seen.sum(-1, keepdim=True).clamp(min=1e-9)
    entropy = -(shares * shares.clamp(min=1e-12).log()).sum(-1)
    concentration = 1 - entropy.exp() / asked.shape[-1]
    others = [0.5 * (shares - shares.roll(step, 0)).abs().sum(-1) for step in range(1, count)]
    return (asked.sum(-1) * concentration * torch.stack(others).mean(0)).mean(0)


def best_heads(scores: Mapping[Head, float]) -> tuple[Head, ...]:
    """The heads with a score near the best one's, ascending, at most MOST_CHOSEN."""
    best = max(scores.values())
    ranked = sorted(scores, key=lambda head: -scores[head])[:MOST_CHOSEN]
    return tuple(sorted(head for head in ranked if scores[head] >= NEAR_BEST * best))


def _look_at(
    model: VisionLanguageModel, builder: PromptBuilder, subject: Subject
) -> tuple[VisualFeatures, Shape, Sequence[LookPrompt]]:
    """Encode the small view of a picture. Returns it with its grid of tokens and the looks at it."""
    processor = builder.processor
    can = processor.capabilities
    if can.regions is None:
        raise InvalidRequest(
            "this model cannot encode images by region, so no head is needed to choose regions; "
            "docs/relevance.md names the models that can",
            param="model",
        )
    image = subject.image
    if can.any_size is not None:
        side = can.any_size.factor
        plan = processor.plan(image.width, image.height, PixelBudget())
        ((height, width),) = plan.sizes
        rows, columns = look_shape((height // side, width // side))
        pixels = resize(picture(image), rows * side, columns * side, can.any_size.resample)
        image = to_image(PIL.Image.fromarray(pixels))
    plan = processor.plan(image.width, image.height, PixelBudget())
    prompts = [builder.look_prompt(image, plan, question) for question in subject.questions]
    found = [prompt for prompt in prompts if prompt is not None]
    if len(found) < len(prompts):
        raise InvalidRequest("the model's chat template refuses a question about an image", param="model")
    ready, tiler = processor.process(image, plan), model.tiler()
    if tiler is not None:  # the first tile is the view of the whole
        arrays = {"pixel_values": ready.arrays["pixel_values"][:1]}
        [base] = run_to_end(tiler.tiles(replace(ready, arrays=arrays)))
        return VisualFeatures(base), (1, len(base)), found
    merge = model.merge or 1
    return model.encode(ready), (plan.grid[1] // merge, plan.grid[2] // merge), found
