"""The expected results of prompts with fewer visual tokens.

Positions are computed independently here, and transformers' decoder computes the logits over them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from fovea import Engine
from fovea.core.media import Image, PixelBudget, VisualTokens, content_identity
from fovea.core.types import ChatPrompt, Completion
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.request.prompt_plan import PreparedPrompt
from fovea.engine.sequence import ImageSpan
from fovea.engine.vision.encoding import Slices, VisualFeatures
from fovea.engine.vision.processor.base import LookPrompt
from tests.support.checkpoints import write
from tests.support.engines import ask
from tests.support.reference import FAULTS, skip_before

ANY_SIZE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl", "glm4v")
"""Architectures whose towers take pictures of any size."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def roomy(architecture: str, folder: Path, tokens: int = 640) -> Path:
    """Write a tiny checkpoint whose images may have up to `tokens` visual tokens: enough for regions."""
    write(architecture, folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    area = tokens * (settings["patch_size"] * settings["merge_size"]) ** 2
    if "size" in settings:  # GLM-4.1V, whose settings count every pixel in each of its frames
        area *= settings["temporal_patch_size"]
        limits: dict[str, Any] = {"size": settings["size"] | {"longest_edge": area}}
    else:
        limits = {"max_pixels": area}
    path.write_text(json.dumps(settings | limits))
    return folder


def reduced_budget(method: str = "relevance", **wish: Any) -> PixelBudget:
    return PixelBudget(visual=VisualTokens(method, **wish))


def reduced_prompt(text: str, *images: Image, method: str = "relevance", **wish: Any) -> ChatPrompt:
    return ask(text, *images, budget=reduced_budget(method, **wish))


@cache
def patchy_page(seed: int = 0, width: int = 640, height: int = 960) -> Image:
    """Blank paper with six patches of noise, so that regions differ in relevance."""
    random = np.random.default_rng(seed)
    page = np.full((height, width, 3), 250, np.uint8)
    for _ in range(6):
        top, left = int(random.integers(0, height - 90)), int(random.integers(0, width - 120))
        page[top : top + 90, left : left + 120] = random.integers(0, 255, (90, 120, 3), dtype=np.uint8)
    data = page.tobytes()
    return Image(content_identity("test", width, height, data), width, height, data)


def look_at_one_place(
    model: VisionLanguageModel,
    prompt: LookPrompt,
    view: VisualFeatures,
    grid: tuple[int, int],
    heads: object,
) -> Slices[torch.Tensor]:
    """Stands for `look` in tests of tiny models, which attend to all of an image alike and so need all of it.

    The question decides which of the five most unusual tokens is looked at.
    """
    yield None
    unusual = (view.embeds.float() - view.embeds.float().mean(0)).norm(dim=1).argsort(descending=True)
    attention = torch.full((len(unusual),), 0.001)
    attention[unusual[sum(prompt.asked) % 5]] = 1
    return attention


@contextmanager
def focused_looks() -> Iterator[None]:
    """Questions are about one place of an image, so large images are encoded as regions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fovea.engine.regions.relevance_model.look", look_at_one_place)
        yield


def prepared_prompt(machine: Engine, prompt: ChatPrompt, salt: str = "") -> PreparedPrompt:
    return machine.parts.preparer.builder.build(prompt, salt)


def features_of(machine: Engine, span: ImageSpan) -> VisualFeatures:
    """The features that the decoder got, from the cache; the image must have been used recently."""
    return machine.parts.embeddings.get(span.key)


def grid_of(span: ImageSpan, merge: int = 2) -> tuple[int, int]:
    return span.grid[1] // merge, span.grid[2] // merge


def true_positions(prepared: PreparedPrompt, places: list[torch.Tensor | None], answer: int) -> torch.Tensor:
    """The M-RoPE positions (3, prompt and answer).

    Tokens of an image have the row and column in the whole image, and text continues after the whole image.
    places: (tokens, 2) row and column of each token, for each image; None for an image with all its tokens.
    answer: number of tokens after the prompt.
    """
    columns: list[tuple[int, int, int]] = []
    cursor = 0
    for span, table in zip(prepared.spans, places, strict=True):
        while len(columns) < span.start:
            columns.append((cursor, cursor, cursor))
            cursor += 1
        rows, width = grid_of(span)
        cells = [(n // width, n % width) for n in range(rows * width)] if table is None else table.tolist()
        columns += [(cursor, cursor + row, cursor + column) for row, column in cells]
        cursor += max(rows, width)
    while len(columns) < len(prepared.ids) + answer:
        columns.append((cursor, cursor, cursor))
        cursor += 1
    return torch.tensor(columns).T


def in_raster_order(patches: torch.Tensor, grid: tuple[int, int, int], merge: int = 2) -> torch.Tensor:
    """Patches (t*h*w, values) in merge order as PaddleOCR-VL's (t*h*w, 3, patch, patch), row by row."""
    time, height, width = grid
    blocks = patches.view(time, height // merge, width // merge, merge, merge, -1).transpose(2, 3)
    side = int((patches.shape[1] // 3) ** 0.5)
    return blocks.reshape(time * height * width, 3, side, side)


class Decoder:
    """The transformers model in float32, called with embeddings and positions."""

    def __init__(self, folder: Path) -> None:
        self.model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def encode(
        self, patches: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The visual tokens and DeepStack levels of a vision encoder. patches: in merge order."""
        if self.model.config.model_type == "paddleocr_vl":
            skip_before(*FAULTS["paddleocr_vl"])
            output = self.model.model.get_image_features(in_raster_order(patches, grid), torch.tensor([grid]))
            return torch.cat(output.pooler_output), []
        output = self.model.model.visual(patches, grid_thw=torch.tensor([grid]))
        return output.pooler_output, list(getattr(output, "deepstack_features", None) or [])

    @torch.inference_mode()
    def logits(
        self,
        prepared: PreparedPrompt,
        visual: list[VisualFeatures],
        positions: torch.Tensor,
        answer: list[int],
    ) -> torch.Tensor:
        """The logits before each token of `answer`."""
        ids = torch.tensor(prepared.ids + answer)
        embeds = self.model.get_input_embeddings()(ids)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for span, features in zip(prepared.spans, visual, strict=True):
            embeds[span.start : span.end] = features.embeds
            mask[span.start : span.end] = True
        extra: dict[str, Any] = {}
        if visual and visual[0].deepstack:
            levels = zip(*(features.deepstack for features in visual), strict=True)
            extra = {
                "visual_pos_masks": mask[None],
                "deepstack_visual_embeds": [torch.cat(level) for level in levels],
            }
        where = positions[:, None] if positions.ndim == 2 else positions[None]
        # Without a mask, transformers treats a jump in positions as the beginning of another prompt.
        output = self.model.model.language_model(
            inputs_embeds=embeds[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=where,
            use_cache=False,
            **extra,
        )
        hidden = output.last_hidden_state[0, len(prepared.ids) - 1 : -1]
        return self.model.lm_head(hidden).float()  # type: ignore[no-any-return]


def assert_greedy(logits: torch.Tensor, answer: list[int]) -> None:
    """Assert that each token has the largest logit, up to the rounding of float32."""
    answer_logits = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    deficit = logits.max(1).values - answer_logits
    assert float(deficit.max()) < 1e-4, f"{answer} are below the largest logits by {deficit.tolist()}"


def tokens_of(completion: Completion) -> list[int]:
    return list(completion.token_ids[0])
