"""GLM-4.1V and GLM-4.6V-Flash: rotation in pairs, prompts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fovea import Engine
from fovea.core.errors import InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt, Message, TextPart, VideoPart
from fovea.engine.layers.config import Attention
from fovea.engine.layers.mixers import QueryKeyValue
from fovea.engine.load import build_model, read_config
from fovea.engine.models.registry import build
from fovea.engine.request.inputs import to_image, to_video
from tests.support import published
from tests.support.checkpoints import write
from tests.support.clips import clip
from tests.support.engines import SETTINGS, ask, picture
from tests.support.programs import need_kernels
from tests.support.reference import Reference

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("glm4v", tmp_path_factory.mktemp("glm4v"))


def changed(folder: Path, target: Path, text: dict[str, Any]) -> Path:
    """Copy a checkpoint and change settings of its language model."""
    path = Path(shutil.copytree(folder, target)) / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text
    path.write_text(json.dumps(config))
    return path.parent


def test_the_rotation_of_the_published_checkpoint(tmp_path: Path) -> None:
    config = read_config(published.write("zai-org__GLM-4.1V-9B-Thinking", tmp_path))
    model = build_model(tmp_path, config, torch.device("meta"), torch.bfloat16)
    (rotary,) = model.decoder.config.rotaries
    assert rotary.axes == (0,) * 8 + (1,) * 12 + (2,) * 12
    assert len(rotary.inverse) == 32
    assert model.decoder.config.attention_heads.dim == 128
    assert model.merge == 2


@pytest.mark.parametrize("rotated", [4, 8, 16])
def test_scores_are_those_of_rotated_neighbours(rotated: int) -> None:
    """Rotating halves of our queries and keys gives the scores of rotating pairs of the checkpoint's."""
    heads, kv_heads, size, hidden = 4, 2, 16, 24
    shape = Attention(heads, kv_heads, size, scale=1.0, qkv_bias=True, pairs=True)
    ours, random = QueryKeyValue(hidden, shape, rotated), torch.Generator().manual_seed(0)
    stored = {}
    for name, target in ours.checkpoint_views():
        rows = (heads if "q_proj" in name else kv_heads) * size
        value = torch.randn(rows, *([hidden] if name.endswith("weight") else []), generator=random)
        target.copy_(value.view(target.shape))
        stored[name.removeprefix("../")] = value
    x = torch.randn(5, hidden, generator=random)
    angles = torch.arange(5)[:, None, None] * torch.rand(rotated // 2, generator=random)

    def turn(even: torch.Tensor, odd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()

    def in_pairs(name: str) -> torch.Tensor:
        rows = torch.nn.functional.linear(x, stored[f"{name}.weight"], stored[f"{name}.bias"])
        rows = rows.view(5, -1, size)
        turned = torch.stack(turn(rows[..., 0:rotated:2], rows[..., 1:rotated:2]), -1).flatten(-2)
        return torch.cat((turned, rows[..., rotated:]), -1)

    def in_halves(rows: torch.Tensor) -> torch.Tensor:
        rows, half = rows.view(5, -1, size), rotated // 2
        return torch.cat((*turn(rows[..., :half], rows[..., half:rotated]), rows[..., rotated:]), -1)

    q, k, v = ours(x).split([heads * size, kv_heads * size, kv_heads * size], -1)
    ours_scores = torch.einsum("ihd,jhd->hij", in_halves(q), in_halves(k).repeat_interleave(2, 1))
    theirs = torch.einsum("ihd,jhd->hij", in_pairs("q_proj"), in_pairs("k_proj").repeat_interleave(2, 1))
    torch.testing.assert_close(ours_scores, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        v, torch.nn.functional.linear(x, stored["v_proj.weight"], stored["v_proj.bias"])
    )


@pytest.mark.parametrize(
    "rope",
    [
        {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]},
        {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
        {
            **ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "rope_type": "yarn",
            "factor": 4.0, "original_max_position_embeddings": 1024,
        },
    ],
    ids=["all", "quarter", "yarn"],
)  # fmt: skip
def test_other_rotations_are_those_of_transformers(
    folder: Path, tmp_path: Path, rope: dict[str, Any]
) -> None:
    other = changed(folder, tmp_path / "checkpoint", {"rope_parameters": rope})
    noise = np.random.default_rng(0).integers(0, 255, (120, 90, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    prompt = ask("what is it?", to_image(image))
    with Engine.from_pretrained(str(other), **SETTINGS) as engine:
        answer = engine.generate(prompt, **GREEDY, logprobs=True)
        ids = engine.parts.preparer.builder.build(prompt).ids
    tokens = list(answer.token_ids[0])
    rows = Reference(other).logits(ids, [image], tokens).log_softmax(-1)
    for row, entry in zip(rows, answer.logprobs[0], strict=True):
        assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=1e-3)
        assert float(row.max() - row[entry.id]) < 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, r"\[8, 12, 12\] .* the 4 rotary"),
        (
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}},
            "12 of 16 numbers of a head are rotated; supported: a divisor of 16",
        ),
        ({"hidden_size": 32}, "vision output 64 and decoder width 32 differ"),
        ({"hidden_act": "swish2"}, "swish2"),
    ],
    ids=["sections", "rest", "width", "activation"],
)
def test_what_cannot_be_computed_is_refused(
    folder: Path, tmp_path: Path, text: dict[str, Any], message: str
) -> None:
    if "hidden_size" in text:
        text["rope_parameters"] = {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    config = read_config(changed(folder, tmp_path / "checkpoint", text))
    with pytest.raises(UnsupportedModel, match=message):
        build(config)


def test_the_prompt_has_one_marker_per_token_between_the_marks_of_an_image(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        builder = engine.parts.preparer.builder
        ids = builder.build(ask("what is it?", picture(1, 90, 120))).ids
        text = builder.tokenizer.decode(ids, skip_special_tokens=False)
        tokens = builder.processor.plan(90, 120, PixelBudget()).tokens
        marks = "<|begin_of_image|>" + "<|image|>" * tokens + "<|end_of_image|>"
        assert text == f"[gMASK]<sop><|user|>\n{marks}what is it?<|assistant|>\n"


def test_videos_are_refused_by_name(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        message = Message("user", (VideoPart(to_video(clip())), TextPart("what is it?")))
        with pytest.raises(InvalidRequest, match="takes no videos; models that do: Qwen3.5"):
            engine.generate(ChatPrompt((message,)), **GREEDY)


@pytest.mark.parametrize(
    ("end", "setting", "reasons", "thinking"),
    [
        ("<|assistant|>\n", "auto", False, False),
        ("<|assistant|>\n", "think", True, False),
        ("<|assistant|>\n{% if enable_thinking is false %}<think></think>\n{% endif %}", "auto", True, False),
        ("<|assistant|>\n<think>", "think", True, True),
    ],
    ids=["unknown", "set", "switch", "begun"],
)
def test_reasoning(folder: Path, end: str, setting: str, reasons: bool, thinking: bool) -> None:
    """GLM-4.1V's template has no marks of reasoning, so its reasoning is read if the setting says so."""
    source = (
        "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'][0]['text'] }}{% endfor %}"
    )
    source += "{% if add_generation_prompt %}" + end + "{% endif %}"
    with Engine.from_pretrained(str(folder), **SETTINGS, reasoning=setting, chat_template=source) as engine:
        assert engine.info.reasons is reasons
        assert engine.parts.preparer.builder.build(ask("what is it?")).thinking is thinking


def test_int8_in_bfloat16_answers(folder: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "quantization": "int8"}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        completion = engine.generate(ask("what is it?", picture(1, 90, 120)), **GREEDY)
        assert len(completion.token_ids[0]) == 16
        assert engine.info.quantization == "int8"


def first_logits(engine: Engine, seed: int) -> torch.Tensor:
    """The logits of the first token after a picture and a question."""
    model, seen = engine.runner.model, []
    compute = model.logits
    model.logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]  # type: ignore[method-assign]
    engine.generate(ask("what is it?", picture(seed, 90, 120)), temperature=0, max_tokens=1, ignore_eos=True)
    model.logits = compute  # type: ignore[method-assign]
    return seen[0][0].clone()


def test_the_cpu_kernels_are_as_close_to_float32_as_torch(folder: Path) -> None:
    need_kernels()
    kinds = {"exact": ("float32", "torch"), "torch": ("bfloat16", "torch"), "native": ("bfloat16", "native")}
    rows = {}
    for name, (dtype, kernels) in kinds.items():
        with Engine.from_pretrained(str(folder), **SETTINGS | {"dtype": dtype, "kernels": kernels}) as engine:
            rows[name] = torch.stack([first_logits(engine, seed) for seed in range(8)])
    errors = {name: float((row - rows["exact"]).norm() / rows["exact"].norm()) for name, row in rows.items()}
    assert 0 < errors["native"] <= 1.5 * errors["torch"] < 0.05, errors
