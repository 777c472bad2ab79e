"""PaddleOCR-VL: the published checkpoint's layout, its tower beside transformers', and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.core.errors import InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt, Message, TextPart, VideoPart
from fovea.engine.config import EngineConfig
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.load import load_model, read_config
from fovea.engine.models.paddleocr_vl import PaddleOCRVL
from fovea.engine.models.registry import build
from fovea.engine.reduce.probe import encoder_taps
from fovea.engine.request.inputs import to_video
from fovea.engine.vision.encoding import run_to_end
from fovea.engine.vision.siglip import NaViT
from fovea.engine.vision.vit import ViTConfig
from fovea.kernels.attention import Heads
from fovea.kernels.choose import choose
from fovea.relevance.realizing import Region, View, patch_fractions
from tests.support.checkpoints import write
from tests.support.clips import clip
from tests.support.engines import SETTINGS, ask, picture, shared_model
from tests.support.programs import need_kernels
from tests.support.reduced import in_raster_order
from tests.support.reference import FAULTS, skip_before

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
GRID = (1, 6, 10)
TEXT_FIELDS = (
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps",
    "use_bias", "vocab_size",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("paddleocr_vl", tmp_path_factory.mktemp("paddleocr_vl"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def with_names_of_the_classes(folder: Path) -> None:
    """Give the tensors the names of their attributes in transformers' classes."""
    model = hf.AutoModelForImageTextToText.from_pretrained(folder)
    rewrite(folder, model.state_dict(), json.loads((folder / "config.json").read_text()))
    parts = {".".join(name.split(".")[:2]) for name in tensors_of(folder)}
    assert parts == {"model.visual", "model.projector", "model.language_model", "lm_head.weight"}


def as_published(folder: Path) -> None:
    """Write the layout of PaddlePaddle/PaddleOCR-VL: a flat configuration, and tensors that nothing uses."""
    tower, tensors = "visual.vision_model", tensors_of(folder)
    assert {name.split(".")[0] for name in tensors} == {"visual", "mlp_AR", "model", "lm_head"}
    tensors |= {
        f"{tower}.embeddings.packing_position_embedding.weight": torch.randn(64, 32),
        f"{tower}.head.probe": torch.randn(1, 1, 32),
        f"{tower}.head.attention.in_proj_weight": torch.randn(96, 32),
        f"{tower}.head.mlp.fc1.weight": torch.randn(64, 32),
    }
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    flat = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_paddleocr_vl.PaddleOCRVLConfig"},
        "model_type": "paddleocr_vl",
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_3d_rope": True,
        "video_token_id": 101307,
        **{name: config[name] for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")},
        **{name: text[name] for name in TEXT_FIELDS},
        "vision_config": {
            **{name: value for name, value in vision.items() if name != "rope_parameters"},
            "model_type": "paddleocr_vl",
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
    }
    rewrite(folder, tensors, flat)


@pytest.mark.parametrize("change", [with_names_of_the_classes, as_published])
def test_every_layout_is_the_same_model(folder: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Every tensor is at its place, and the answer is that of the checkpoint that transformers writes."""
    other = Path(shutil.copytree(folder, tmp_path / "checkpoint"))
    change(other)
    assert tensors_of(other).keys() != tensors_of(folder).keys()
    ours, same = (
        dict(load_model(str(path), EngineConfig.of(**SETTINGS, kernels="torch")).model.checkpoint_targets())
        for path in (folder, other)
    )
    assert ours.keys() == same.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(same[name], tensor, rtol=0, atol=0)
    prompt, answers = ask("what is it?", picture(1, 90, 120)), []
    for path in (folder, other):
        with Engine.from_pretrained(str(path), **SETTINGS) as engine:
            answers.append(engine.generate(prompt, **GREEDY).token_ids)
    assert answers[0] == answers[1]


def test_the_prompt_has_placeholders_between_the_marks_of_an_image(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        builder = engine.parts.preparer.builder
        ids = builder.build(ask("OCR:", picture(1, 90, 120))).ids
        text = builder.tokenizer.decode(ids, skip_special_tokens=False)
        tokens = builder.processor.plan(90, 120, PixelBudget()).tokens
        placeholders = "<|IMAGE_PLACEHOLDER|>" * tokens
        assert text == (
            f"<|begin_of_sentence|>User: <|IMAGE_START|>{placeholders}<|IMAGE_END|>OCR:\nAssistant: "
        )


def test_videos_are_refused_by_name(folder: Path) -> None:
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        message = Message("user", (VideoPart(to_video(clip())), TextPart("what is it?")))
        with pytest.raises(InvalidRequest, match="takes no videos; models that do: Qwen3.5"):
            engine.generate(ChatPrompt((message,)), **GREEDY)


@pytest.mark.parametrize("changes", [{"use_bias": False}, {"use_bias": True}], ids=str)
def test_biases_are_those_of_the_configuration(folder: Path, changes: dict[str, bool]) -> None:
    config = read_config(folder)
    config.text_config.use_bias = changes["use_bias"]
    names = {name for name, _ in build(config).checkpoint_targets() if name.startswith("decoder.layers.0.")}
    biases = {name.split(".")[-2] for name in names if name.endswith(".bias")}
    maps = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert biases == (maps if changes["use_bias"] else set())


def test_sections_that_the_configuration_omits_are_those_of_the_class(folder: Path) -> None:
    config = read_config(folder)
    config.text_config.head_dim = 128
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    axes = build(config).decoder.config.rotaries[0].axes
    assert axes == (0,) * 16 + (1,) * 24 + (2,) * 24


def test_what_the_tower_cannot_compute_is_refused(folder: Path) -> None:
    config = read_config(folder)
    config.vision_config.rope_parameters = {"rope_type": "yarn", "rope_theta": 10000.0}
    with pytest.raises(
        UnsupportedModel, match="vision RoPE of type 'yarn' is not supported; supported: axial"
    ):
        build(config)
    config = read_config(folder)
    config.vision_config.num_attention_heads = 16
    with pytest.raises(UnsupportedModel, match="heads of size 2: accepted are multiples of 4"):
        build(config)


@torch.inference_mode()
def test_taps_are_the_attention_of_transformers(folder: Path) -> None:
    """The mean over heads, queries and a token's patches of transformers' own attention in the last layer."""
    skip_before(*FAULTS["paddleocr_vl"])
    model = shared_model(folder).model
    theirs = hf.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    last = theirs.model.visual.vision_model.encoder.layers[-1].self_attn
    seen: dict[str, Any] = {}
    last.register_forward_hook(lambda _module, _inputs, output: seen.update(weights=output[1]))
    last.k_proj.register_forward_hook(lambda _module, _inputs, output: seen.update(keys=output))
    patches = torch.randn(60, 588, generator=torch.Generator().manual_seed(0))
    theirs.model.get_image_features(in_raster_order(patches, GRID), torch.tensor([GRID]))
    received = seen["weights"][0].mean(dim=(0, 1, 2))
    keys = seen["keys"].view(60, 4, -1).mean(1)

    def by_token(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(3, 2, 5, 2, -1).mean(dim=(1, 3)).flatten(0, 1)

    tower = model.any_size_tower()
    assert tower is not None
    taps = encoder_taps(tower, patches, GRID)
    torch.testing.assert_close(taps.attention, by_token(received)[:, 0], atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(taps.keys, by_token(keys), atol=1e-5, rtol=1e-3)


@torch.inference_mode()
def test_a_region_has_the_learned_positions_of_its_place(folder: Path) -> None:
    """A native region and the same patches of the whole image give the first layer equal inputs."""
    model = shared_model(folder).model
    assert isinstance(model, PaddleOCRVL)
    grid, region = (5, 7), Region(1, 2, 3, 4)
    patches = torch.randn(5, 7, 4, 588, generator=torch.Generator().manual_seed(0))
    inputs: list[torch.Tensor] = []
    first: Any = model.vision.encoder.layers[0]
    hook = first.layer_norm1.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].clone()))
    tower = model.any_size_tower()
    run_to_end(tower.slices(patches.view(-1, 588), (1, 10, 14)))
    crop = patches[1:4, 2:6].reshape(-1, 588)
    at = patch_fractions(View(region, (3, 4), ()), grid, 2, corners=tower.corners)
    run_to_end(tower.slices(crop, (1, 6, 8), at))
    hook.remove()
    whole, part = inputs
    expected = whole.view(5, 7, 4, -1)[1:4, 2:6].reshape(part.shape)
    torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)


def published_tower(dtype: torch.dtype) -> NaViT:
    """Two layers of the published tower's widths: heads of 72 numbers, which is no multiple of a vector."""
    config = ViTConfig(
        hidden=1152, depth=2, heads=16, intermediate=4304, activation="gelu_pytorch_tanh", eps=1e-6,
        image_size=384, patch_size=14, channels=3, class_token=False, patch_bias=True, pre_norm=False,
        post_norm=True, taps=(2,),
    )  # fmt: skip
    tower, random = NaViT(config, 2, 10000.0), torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        values = torch.randn(parameter.shape, generator=random) * 0.03
        parameter.data = (values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)).to(dtype)
    return tower


@torch.inference_mode()
def test_the_cpu_kernels_compute_the_published_widths() -> None:
    """In bfloat16, Fovea's own kernels are as close to float32 as torch's are."""
    need_kernels()
    random = torch.Generator().manual_seed(1)
    patches, grid = torch.randn(10 * 14, 588, generator=random).bfloat16(), (1, 10, 14)
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


def test_int8_in_bfloat16_answers(folder: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "quantization": "int8"}
    with Engine.from_pretrained(str(folder), **settings) as engine:
        completion = engine.generate(ask("what is it?", picture(1, 90, 120)), **GREEDY)
        assert len(completion.token_ids[0]) == 16
        assert engine.info.quantization == "int8"
