"""Looks at a small view of an image with the question, to learn what part of the image the question is about.

The model knows where to look before it can read what is there: the last token of the question attends to the
asked thing, in some heads of the decoder's middle layers. The idea is that of "MLLMs Know Where to Look"
(arXiv 2502.17422); that few heads are enough, of "Your Large Vision-Language Model Only Needs A Few Attention
Heads For Visual Grounding" (arXiv 2503.06287).

A look is a prompt of its own: the view, the question, and a request for a brief answer, because a model that
is about to begin a sentence attends to its words, not to the image. Some tokens get attention whatever is
asked. The same view with a request to describe the image shows which, and they count less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fovea.engine.layers.config import DecoderConfig
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.look_heads import Head
from fovea.engine.reduce.prompt_run import PromptRun
from fovea.engine.vision.encoding import Slices, VisualFeatures
from fovea.engine.vision.processor.base import LookPrompt

MIDDLE = 0.5, 0.8
"""The layers whose heads are read if none were chosen for the model: a share of the depth, from and to."""
TWICE = 2.0
"""A token counts fully if the question gives it so many times the attention that no question would."""


def usual_heads(config: DecoderConfig) -> tuple[Head, ...]:
    """All heads of the middle layers: those that are read if none were chosen for the model."""
    first, last = (share * len(config.layers) for share in MIDDLE)
    heads = config.look_heads
    return tuple(head for head in heads if first <= head[0] < last) or heads


def look(
    model: VisionLanguageModel,
    prompt: LookPrompt,
    view: VisualFeatures,
    grid: tuple[int, int],
    heads: Sequence[Head],
) -> Slices[Tensor]:
    """How much the question attends to each token of a view, (tokens,) in float32, not negative.

    view: features of the tokens. With places, they are tokens of the full grid.
    grid: (rows, columns) of the tokens, or of the full grid.
    heads: ascending; at least one.
    """
    run = PromptRun(model, prompt.before, view, (prompt.asked, prompt.neutral), grid)
    maps = []
    for layer, members in groupby(heads, lambda head: head[0]):
        while run.done < layer:
            run.run(run.done + 1)
            yield None
        asked, neutral = run.attention(layer)
        numbers = [head for _, head in members]
        maps.append(beyond_usual(asked[numbers], neutral[numbers]))
    return torch.cat(maps).mean(0)


def beyond_usual(asked: Tensor, neutral: Tensor) -> Tensor:
    """The attention for a question, less where a neutral request attends, too.

    asked, neutral: (heads, tokens), attention for the question and for the neutral request.
    """
    return asked * (asked / (TWICE * neutral).clamp(min=1e-9)).clamp(max=1)
