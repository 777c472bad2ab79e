"""DeepSeek-OCR 2: both encoders beside transformers', names of tensors, experts, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image as PILImage
from safetensors.torch import load_file
from torch.nn import functional
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as theirs
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil

from fovea import Engine
from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.core.media import Image, PixelBudget
from fovea.engine.config import EngineConfig
from fovea.engine.layers.config import Experts
from fovea.engine.layers.experts import ExpertsBlock
from fovea.engine.load import build_model, load_model
from fovea.engine.models.targets import assign
from fovea.engine.vision.encoding import one_by_one
from fovea.engine.vision.processor.base import VisualPlan
from fovea.engine.vision.sam import relative_table
from tests.support import published
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, ask, picture, shared_model
from tests.support.programs import need_kernels
from tests.support.thorough import others_slow

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("deepseek_ocr2", tmp_path_factory.mktemp("deepseek_ocr2"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def changed(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other fields in config.json. A dot in a name leads into a section."""
    copy = Path(shutil.copytree(folder, target / "checkpoint"))
    config = json.loads((copy / "config.json").read_text())
    for name, value in changes.items():
        *path, last = name.split(".")
        part = config
        for step in path:
            part = part[step]
        part[last] = value
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def their_features(model: Any, folder: Path, image: Image, **options: Any) -> torch.Tensor:
    pixels = PILImage.frombytes("RGB", (image.width, image.height), image.rgb)
    processor = DeepseekOcr2ImageProcessorPil.from_pretrained(folder)
    inputs = processor(images=pixels, return_tensors="pt", **options)
    features: torch.Tensor = model.get_image_features(**inputs).pooler_output[0]
    return features


@pytest.mark.parametrize(
    ("size", "detail", "tiles"),
    [
        pytest.param((60, 70), "high", 0, marks=pytest.mark.slow),
        ((130, 90), "high", 2),
        pytest.param((60, 400), "high", 3, marks=pytest.mark.slow),
        pytest.param((200, 90), "low", 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.inference_mode()
def test_features_are_those_of_transformers(
    folder: Path, reference: Any, size: tuple[int, int], detail: Any, tiles: int
) -> None:
    """The tiles come first, then the view, then the separator. "low" is a view without tiles."""
    loaded, image = shared_model(folder), picture(3, *size)
    plan = loaded.processor.plan(*size, PixelBudget(detail=detail))
    ours = loaded.model.encode(loaded.processor.process(image, plan)).embeds
    expected = their_features(reference, folder, image, crop_to_patches=detail == "high")
    assert ours.shape == expected.shape == (plan.tokens, 64)
    assert plan.grid[1] * plan.grid[2] == tiles
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_slices_of_any_length_give_equal_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that are cut by groups and heads, and slices that are cut by rows of the picture."""
    loaded, image = shared_model(folder), picture(3, 60, 70)
    processed = loaded.processor.process(image, loaded.processor.plan(60, 70, PixelBudget()))
    with torch.inference_mode():
        whole = loaded.model.encode(processed).embeds
        monkeypatch.setattr("fovea.engine.vision.sam.PAIRS_PER_ROW", 10**6)
        groups = sum(1 for _ in one_by_one(loaded.model.encode_slices(processed)))
        joined = loaded.model.encode(processed).embeds
        monkeypatch.setattr("fovea.engine.vision.sam.PAIRS_PER_ROW", 64**3)
        monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 10)
        rows = sum(1 for _ in one_by_one(loaded.model.encode_slices(processed)))
        parts = loaded.model.encode(processed).embeds
    assert groups < 70 < 350 < rows
    torch.testing.assert_close(joined, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_relative_positions_are_resampled_as_in_transformers() -> None:
    table, stub = torch.randn(127, 8), object.__new__(theirs.DeepseekOcr2SamVisionAttention)
    for side in (64, 48, 14, 3, 1):
        expected = stub.get_rel_pos(side, side, table)
        torch.testing.assert_close(relative_table(table, side), expected)


@pytest.mark.parametrize("size", others_slow([(60, 70), (60, 400)], [(60, 70)]), ids=str)
@torch.inference_mode()
def test_the_shape_counts_what_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Pairs of rows per head. SAM's are scores; the queries' scores that the mask forbids do not count."""
    loaded, pairs, attend = shared_model(folder), [0, 0], functional.scaled_dot_product_attention

    def count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = options.get("attn_mask")
        scores = q.shape[0] * q.shape[2] * k.shape[2]
        if options.get("enable_gqa"):
            pairs[1] += scores if mask is None else q.shape[0] * int(mask.sum())
        else:
            pairs[0] += scores * q.shape[1]
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    plan: VisualPlan = loaded.processor.plan(*size, PixelBudget())
    loaded.model.encode(loaded.processor.process(picture(3, *size), plan))
    shape = loaded.model.visual_shape(plan)
    sam_heads, widths = 2, (16, 32)
    assert shape.pairs == pairs[0] // sam_heads + pairs[1] * widths[1] // widths[0]
    assert shape.projector_rows == plan.tokens - 1
    assert shape.rows == shape.patches == 16 * shape.projector_rows


def test_both_sets_of_names_load_to_the_same_model(folder: Path, reference: Any, tmp_path: Path) -> None:
    """transformers writes the authors' names by default, and those of its classes if it is told to."""
    copy = Path(shutil.copytree(folder, tmp_path / "own_names"))
    reference.save_pretrained(copy, save_original_format=False)
    authors, own = (load_file(path / "model.safetensors") for path in (folder, copy))
    assert "model.sam_model.blocks.0.norm1.weight" in authors
    assert "model.vision_tower.sam_encoder.layers.0.layer_norm1.weight" in own
    first, second = (dict(shared_model(path).model.checkpoint_targets()) for path in (folder, copy))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_the_published_decoder_and_sam_encoder_have_their_places() -> None:
    """No list of DeepSeek-OCR 2's own tensors was found. DeepSeek-OCR has the same decoder and SAM encoder.

    Its second encoder is CLIP's, and its last convolution and the projector have other widths.
    """
    known = published.facts("deepseek-ai__DeepSeek-OCR")["config"]
    names = (
        "hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size", "n_group",
        "n_routed_experts", "n_shared_experts", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "topk_group", "topk_method", "vocab_size",
    )  # fmt: skip
    text = {name: known["language_config"][name] for name in names}
    text["mlp_layer_types"] = ["dense"] + ["sparse"] * 11
    encoder = {
        "hidden_size": 896, "num_hidden_layers": 1, "num_attention_heads": 14, "num_key_value_heads": 2,
    }  # fmt: skip
    config = hf.DeepseekOcr2Config(vision_config={"encoder_config": encoder}, text_config=text)
    model = build_model(Path("published"), config, torch.device("meta"), torch.bfloat16)
    entries = [
        entry
        for entry in published.entries("deepseek-ai__DeepSeek-OCR")
        if not entry.name.startswith(("model.vision_model.", "model.image_newline"))
    ]
    targets = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_targets()}
    found = assign([("model.safetensors", entries)], targets, model.ignored, model.renames)
    problems = {problem.name for problem in found.problems if problem.kind != "missing"}
    assert problems == {"model.sam_model.net_3.weight", "model.projector.layers.weight"}
    missing = [problem.name for problem in found.problems if problem.kind == "missing"]
    own = ("vision.vision_encoder.", "vision.query_", "vision.sam_encoder.proj.conv2.", "projector.weight")
    assert missing
    assert all(name.startswith(own) for name in missing)
    assert len(found.fills) + len(problems) == len(entries) > 2000


@pytest.mark.parametrize(("shared", "scaling"), [(2, 1.5), (1, 16.0)])
@torch.inference_mode()
def test_a_block_of_experts_is_that_of_transformers(shared: int, scaling: float) -> None:
    config = hf.DeepseekOcr2Config().text_config.__class__(
        hidden_size=32, num_attention_heads=2, n_routed_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=24, n_shared_experts=shared, routed_scaling_factor=scaling, n_group=1,
        topk_group=1,
    )  # fmt: skip
    block = theirs.DeepseekOcr2TextMoe(config)
    ours = ExpertsBlock(
        32, Experts(7, 3, 24, "silu", 24 * shared, shared_gate=False, normalized=False, scaling=scaling)
    )
    random = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.normal_(0, 0.3, generator=random)
    assert ours.shared_expert is not None
    ours.gate.weight.copy_(block.gate.weight)
    ours.experts.gate_up.weight.copy_(block.experts.gate_up_proj)
    ours.experts.down.weight.copy_(block.experts.down_proj)
    gate, up = block.shared_experts.gate_proj.weight, block.shared_experts.up_proj.weight
    ours.shared_expert.gate_up.weight.copy_(torch.cat((gate, up)))
    ours.shared_expert.down_proj.weight.copy_(block.shared_experts.down_proj.weight)
    x = torch.randn(11, 32, generator=random)
    torch.testing.assert_close(ours(x, None), block(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(x, 2 * x), 2 * x + block(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config.topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy'"),
        ({"text_config.mlp_bias": True}, "mlp_bias is true"),
        ({"text_config.num_experts_per_tok": 7}, r"num_experts_per_tok is 7; accepted: 1 to .*\(6\)"),
        ({"text_config.num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ({"text_config.mlp_layer_types": ["dense"]}, "for each of the 3 layers"),
        ({"text_config.mlp_layer_types": None}, "mlp_layer_types is None"),
        ({"vision_config.sam_config.use_rel_pos": False}, "use_rel_pos is false; accepted: true"),
        ({"vision_config.sam_config.use_abs_pos": False}, "use_abs_pos is false; accepted: true"),
        ({"vision_config.sam_config.global_attn_indexes": [3]}, "different numbers from 0 to 2"),
        ({"vision_config.sam_config.downsample_channels": [8, 16, 32]}, "accepted: two widths"),
        ({"vision_config.sam_config.downsample_channels": [8, 16]}, r"downsample_channels \(16\)"),
        (
            {"vision_config.sam_config.image_size": [128, 128]},
            "image_size is .128, 128.; accepted: an integer",
        ),
        (
            {"vision_config.encoder_config.layer_types": ["full_attention", "sliding_attention"]},
            "full_attention in every layer",
        ),
    ],
    ids=str,
)
def test_refused_settings(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(changed(folder, tmp_path, **changes)), EngineConfig.of(**SETTINGS))


@pytest.mark.parametrize(
    "name",
    [
        "text_config.n_routed_experts",
        "vision_config.sam_config.mlp_dim",
        "vision_config.sam_config.output_channels",
    ],
)
def test_endless_numbers_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 1000000000000; accepted: integers from 1"):
        load_model(str(changed(folder, tmp_path, **{name: 10**12})), EngineConfig.of(**SETTINGS))


def test_int8_in_bfloat16_answers(folder: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "quantization": "int8"}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        completion = engine.generate(ask("what is it?", picture(1, 150, 90)), **GREEDY)
        assert len(completion.token_ids[0]) == 16
        assert engine.info.quantization == "int8"


@torch.inference_mode()
def test_the_cpu_kernels_compute_the_features(folder: Path) -> None:
    """In bfloat16, Fovea's own kernels are as close to float32 as torch's are."""
    need_kernels()
    image = picture(3, 60, 70)
    plan = shared_model(folder).processor.plan(60, 70, PixelBudget())
    processed = shared_model(folder).processor.process(image, plan)
    expected = shared_model(folder).model.encode(processed).embeds
    errors = {}
    for name in ("torch", "native"):
        settings = SETTINGS | {"dtype": "bfloat16", "kernels": name}
        loaded = load_model(str(folder), EngineConfig.of(**settings))
        rows = loaded.model.encode(processed).embeds.float()
        errors[name] = float((rows - expected).norm() / expected.norm())
    assert errors["torch"] < 0.05
    assert errors["native"] <= 1.2 * errors["torch"]
