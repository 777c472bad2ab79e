"""MiniCPM-V 4.6: its tower beside transformers', its prompts, the published shapes, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image as PILImage
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.vision_utils import get_vision_nearest_position_ids

from fovea import Engine
from fovea.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from fovea.core.media import Image, PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart, VideoPart
from fovea.engine.config import EngineConfig
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.load import build_model, load_model
from fovea.engine.models.targets import canonical
from fovea.engine.request.inputs import to_video
from fovea.engine.vision.encoding import one_by_one, run_to_end
from fovea.engine.vision.processor.sizes import nested_coordinates
from fovea.engine.vision.siglip import MergingViT
from fovea.engine.vision.vit import ViTConfig
from fovea.kernels.attention import Heads
from fovea.kernels.choose import choose
from tests.support.checkpoints import write
from tests.support.clips import clip
from tests.support.engines import SETTINGS, ask, picture, shared_model
from tests.support.programs import need_kernels
from tests.support.reference import FAULTS, skip_before, skip_before_mode_4x
from tests.support.thorough import others_slow

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
PAD = "<|image_pad|>"
SIZES = [(70, 60), (250, 190), (60, 400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("minicpmv4_6", tmp_path_factory.mktemp("minicpmv4_6"))


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


def with_mode(folder: Path, target: Path, mode: str) -> Path:
    copy = changed(folder, target, downsample_mode=mode)
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "downsample_mode": mode}))
    return copy


def their_features(folder: Path, image: Image) -> torch.Tensor:
    skip_before(*FAULTS["minicpmv4_6"])
    model = hf.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = PILImage.frombytes("RGB", (image.width, image.height), image.rgb)
    inputs = MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)(images=pixels, return_tensors="pt")
    return torch.cat(model.get_image_features(inputs["pixel_values"], inputs["target_sizes"]).pooler_output)


@pytest.mark.parametrize("mode", ["16x", "4x"])
@pytest.mark.parametrize(
    "size", others_slow([(70, 60), (250, 190), (60, 400)], [(70, 60), (250, 190)]), ids=str
)
@torch.inference_mode()
def test_features_are_those_of_transformers(
    folder: Path, tmp_path: Path, mode: str, size: tuple[int, int]
) -> None:
    if mode == "4x":
        skip_before_mode_4x()
    checkpoint = with_mode(folder, tmp_path, mode)
    loaded = load_model(str(checkpoint), EngineConfig.of(**SETTINGS))
    image = picture(3, *size)
    plan = loaded.processor.plan(*size, PixelBudget())
    assert plan.grid[1] * plan.grid[2] > 1 or size == (70, 60)
    ours = loaded.model.encode(loaded.processor.process(image, plan)).embeds
    expected = their_features(checkpoint, image)
    assert ours.shape == expected.shape == (plan.tokens, 64)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 3])
@torch.inference_mode()
def test_the_merge_may_come_after_the_first_layer_or_the_last(
    folder: Path, tmp_path: Path, layer: int
) -> None:
    checkpoint = changed(folder, tmp_path, insert_layer_id=layer)
    loaded = load_model(str(checkpoint), EngineConfig.of(**SETTINGS))
    image = picture(4, 150, 100)
    plan = loaded.processor.plan(150, 100, PixelBudget())
    ours = loaded.model.encode(loaded.processor.process(image, plan)).embeds
    torch.testing.assert_close(ours, their_features(checkpoint, image), atol=1e-5, rtol=1e-4)


def test_slices_of_any_length_give_equal_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, image = shared_model(folder), picture(3, 250, 190)
    processed = loaded.processor.process(image, loaded.processor.plan(250, 190, PixelBudget()))
    with torch.inference_mode():
        whole = loaded.model.encode(processed).embeds
        monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 16)
        pauses = sum(1 for _ in one_by_one(loaded.model.encode_slices(processed)))
        parts = loaded.model.encode(processed).embeds
    assert pauses > 50
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_the_table_of_positions_is_read_at_fractions_of_the_picture() -> None:
    """A grid of the table's own size reads every entry once; a larger one repeats neighbours."""
    config = ViTConfig(
        hidden=8, depth=1, heads=2, intermediate=8, activation="gelu", eps=1e-6, image_size=980,
        patch_size=14, channels=3, class_token=False, patch_bias=True, pre_norm=False, post_norm=True,
        taps=(1,),
    )  # fmt: skip
    tower = MergingViT(config, 1)
    ids = tower._positions((140, 4)).numpy()
    assert sorted(set(ids // 70)) == list(range(70))
    assert np.bincount(ids // 70).max() <= 3 * 4
    assert sorted(set(ids % 70)) == [0, 17, 35, 52]
    assert ids[:8].tolist() == [0, 17, 0, 17, 35, 52, 35, 52], "two squares of 2 x 2 in the first rows"
    for count in range(4, 460, 4):
        expected = get_vision_nearest_position_ids(torch.tensor([[count, 4]]), 70)
        order = nested_coordinates((count, 4), 2) @ [4, 1]
        assert tower._positions((count, 4)).equal(expected[order])


def published_tower(dtype: torch.dtype) -> MergingViT:
    """Two layers of the published tower's width, heads of 72 numbers, with a narrower feed-forward block."""
    config = ViTConfig(
        hidden=1152, depth=2, heads=16, intermediate=608, activation="gelu_pytorch_tanh", eps=1e-6,
        image_size=980, patch_size=14, channels=3, class_token=False, patch_bias=True, pre_norm=False,
        post_norm=True, taps=(2,),
    )  # fmt: skip
    tower, random = MergingViT(config, 1), torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        values = torch.randn(parameter.shape, generator=random) * 0.03
        parameter.data = (values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)).to(dtype)
    return tower


@torch.inference_mode()
def test_the_cpu_kernels_compute_the_published_widths() -> None:
    """In bfloat16, Fovea's own kernels are as close to float32 as torch's are."""
    need_kernels()
    random = torch.Generator().manual_seed(1)
    patches, grid = torch.randn(2, 4 * 12, 588, generator=random).bfloat16(), (4, 12)
    plain = published_tower(torch.bfloat16)
    expected = run_to_end(deepcopy(plain).float().slices(patches.float(), grid))
    errors = {}
    for name in ("torch", "native"):
        tower = deepcopy(plain)
        kernels = choose(name, torch.device("cpu"), torch.bfloat16, Heads(16, 2, 128))
        for layer in tower.modules():
            if isinstance(layer, Linear):
                layer.pack(kernels)
        use_kernels(tower, kernels)
        rows = run_to_end(tower.slices(patches, grid)).float()
        errors[name] = float((rows - expected).norm() / expected.norm())
    assert errors["torch"] < 0.02
    assert errors["native"] <= 1.2 * errors["torch"]


def prompt_text(folder: Path, prompt: ChatPrompt) -> str:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        builder = engine.parts.preparer.builder
        text: str = builder.tokenizer.decode(builder.build(prompt).ids, skip_special_tokens=False)
        return text


def test_a_prompt_numbers_its_images_over_all_turns(folder: Path) -> None:
    small, large = picture(1, 60, 60), picture(2, 150, 90)
    prompt = ChatPrompt(
        (
            Message("user", (ImagePart(small), TextPart("this?"))),
            Message("assistant", (TextPart("a square"),)),
            Message("user", (ImagePart(large), ImagePart(small), TextPart("and these?"))),
        )
    )
    plan = shared_model(folder).processor.plan(150, 90, PixelBudget())
    assert (plan.grid, plan.sizes, plan.tokens) == ((1, 1, 2), ((56, 112), (112, 112)), 6)
    one = f"<image>{PAD * 4}</image>"
    two = f"<image>{PAD * 2}</image>" + f"<slice>{PAD * 2}</slice>" * 2
    assert prompt_text(folder, prompt) == (
        f"<|im_start|>user\n<image_id>0</image_id>{one}\nthis?<|im_end|>\n"
        "<|im_start|>assistant\na square<|im_end|>\n"
        f"<|im_start|>user\n<image_id>1</image_id>{two}\n<image_id>2</image_id>{one}\n"
        "and these?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_number_of_an_image_does_not_make_it_another_image(folder: Path) -> None:
    """The encoder's output is shared by all places of an image in prompts."""
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        build_prompt = engine.parts.preparer.builder.build
        first, second = (
            build_prompt(ask("?", picture(1), picture(2))),
            build_prompt(ask("?", picture(2), picture(1))),
        )
        assert [image.key for image in first.images] == [image.key for image in reversed(second.images)]
        assert first.ids == second.ids, "the pictures have one size, so only their pixels differ"


def test_marks_of_images_in_the_users_text_are_text(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        builder = engine.parts.preparer.builder
        special = builder.tokenizer.encode("<image_id></image_id><slice>")
        assert len(special) == 3
        assert not set(special) & set(builder.build(ask("<image_id>7</image_id><slice>")).ids)


def test_videos_are_refused_by_name(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        message = Message("user", (VideoPart(to_video(clip())), TextPart("what is it?")))
        with pytest.raises(InvalidRequest, match="takes no videos; models that do: Qwen3.5"):
            engine.generate(ChatPrompt((message,)), **GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"insert_layer_id": -1}, "insert_layer_id is -1; supported: 0 to 3"),
        ({"insert_layer_id": 4}, "insert_layer_id is 4; supported: 0 to 3"),
        ({"merger_times": 2}, "merger_times is 2; supported: 1"),
        ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size is \(2, 1\); supported: \[2, 2\]"),
        ({"vision_config.window_kernel_size": [4, 4]}, r"window_kernel_size is \(4, 4\)"),
        ({"drop_vision_last_layer": True}, "drop_vision_last_layer is True; supported: false"),
        ({"downsample_mode": "8x"}, "downsample_mode is '8x'; supported: 4x and 16x"),
        (
            {"vision_config.patch_size": [14, 14]},
            r"vision_config.patch_size is \[14, 14\]; supported: an integer",
        ),
    ],
    ids=str,
)
def test_refused_settings(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(changed(folder, tmp_path, **changes)), EngineConfig.of(**SETTINGS))


def test_a_processor_of_another_mode_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="downsample_mode: the processor's files say 16x"):
        load_model(str(changed(folder, tmp_path, downsample_mode="4x")), EngineConfig.of(**SETTINGS))


def test_int8_in_bfloat16_answers(folder: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "quantization": "int8"}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        completion = engine.generate(ask("what is it?", picture(1, 150, 90)), **GREEDY)
        assert len(completion.token_ids[0]) == 16
        assert engine.info.quantization == "int8"


PUBLISHED: dict[str, tuple[int, ...]] = {
    "model.language_model.embed_tokens.weight": (248094, 1024),
    "model.language_model.layers.3.self_attn.q_proj.weight": (4096, 1024),
    "model.language_model.layers.22.linear_attn.in_proj_qkv.weight": (6144, 1024),
    "model.language_model.layers.22.linear_attn.conv1d.weight": (6144, 1, 4),
    "model.vision_tower.embeddings.patch_embedding.weight": (1152, 3, 14, 14),
    "model.vision_tower.embeddings.position_embedding.weight": (4900, 1152),
    "model.vision_tower.encoder.layers.26.mlp.fc1.weight": (4304, 1152),
    "model.vision_tower.post_layernorm.weight": (1152,),
    "model.vision_tower.vit_merger.layer_norm1.weight": (1152,),
    "model.vision_tower.vit_merger.linear_1.weight": (17216, 4608),
    "model.vision_tower.vit_merger.linear_2.weight": (1152, 17216),
    "model.vision_tower.vit_merger.pre_norm.weight": (4608,),
    "model.vision_tower.vit_merger.self_attn.q_proj.weight": (1152, 1152),
    "model.merger.mlp.0.pre_norm.weight": (4608,),
    "model.merger.mlp.0.linear_1.weight": (4608, 4608),
    "model.merger.mlp.0.linear_2.weight": (1024, 4608),
}
"""Some of the 779 tensors of the published checkpoint, with their shapes."""


def test_the_published_configuration_has_the_published_tensors() -> None:
    """Its RoPE parameters name no M-RoPE sections, and the decoder's positions are plain."""
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
        "image_size": 980, "patch_size": 14, "num_channels": 3,
    }  # fmt: skip
    text = hf.Qwen3_5TextConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, vocab_size=248094, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    config = hf.MiniCPMV4_6Config(
        vision_config=vision,
        text_config=text,
        insert_layer_id=6,
        image_token_id=248056,
        tie_word_embeddings=True,
    )
    # The storage is never written to, so it takes no memory.
    model = build_model(Path("published"), config, torch.device("cpu"), torch.bfloat16)
    # Loading views some tensors in other shapes of the same size.
    targets = {name: tensor.numel() for name, tensor in model.checkpoint_targets()}
    assert len(targets) == 779
    rules = [(re.compile(pattern), replacement) for pattern, replacement in model.renames]
    for name, shape in PUBLISHED.items():
        assert targets[canonical(name, rules)] == math.prod(shape)
    assert model.decoder.config.rotaries[0].axes is None
    assert len(model.decoder.config.rotaries[0].inverse) == 32
