"""InternVL: all kinds of towers and decoders, and both layouts of its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.core.errors import CheckpointError, InvalidRequest, ModelError, UnsupportedModel
from fovea.core.media import Image, PixelBudget, VisualTokens, video_of_images
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart, VideoPart
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model, read_config
from fovea.engine.models.tokenizer import added_ids
from tests.support.checkpoints import INTERNVL_TEMPLATE, randomise, write
from tests.support.engines import ask, picture
from tests.support.internvl import WEIGHTS, to_original
from tests.support.reference import Reference
from tests.support.thorough import is_thorough, others_slow

TOKENS = 24 if is_thorough() else 8
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_blocks": 64}
TEXT = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 1024, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
LARGE_TOWER = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
"""The kind of tower of InternVL's larger models."""
Edit = Callable[[Path], None]


def variant(folder: Path, text: Any, vision: dict[str, Any], **config: Any) -> Path:
    """Write a checkpoint for transformers with another tower or decoder than `write` makes."""
    write("internvl", folder)
    ids = {"image_token_id": json.loads((folder / "config.json").read_text())["image_token_id"]}
    settings = {"tie_word_embeddings": False, **ids, **config}
    torch.manual_seed(1)
    model = hf.InternVLForConditionalGeneration(
        hf.InternVLConfig(
            vision_config=hf.InternVLVisionConfig(**{**VISION, **vision}), text_config=text, **settings
        )
    )
    randomise(model.eval()).save_pretrained(folder)
    (folder / "processor_config.json").write_text("{}")
    return folder


def edit_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def answer(folder: Path, prompt: ChatPrompt, **settings: Any) -> Any:
    with Engine.from_pretrained(str(folder), **{**SETTINGS, **settings}) as engine:
        return engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True)


def same_as_transformers(folder: Path) -> None:
    """The tokens are those of transformers; log-probabilities are within 1e-3."""
    image = picture(3, 150, 70)
    with Engine.from_pretrained(str(folder), **SETTINGS) as engine:
        prompt = ask("what is it?", image)
        ours = engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True)
        ids = engine.parts.preparer.builder.build(prompt).ids
    reference, images = Reference(folder), [as_pil(image)]
    tokens = list(ours.token_ids[0])
    rows = reference.logits(ids, images, tokens).log_softmax(-1)
    assert rows.argmax(-1).tolist() == tokens
    theirs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
    assert [entry.logprob for entry in ours.logprobs[0]] == pytest.approx(theirs, abs=1e-3)


def as_pil(image: Image) -> Any:
    import PIL.Image

    return PIL.Image.frombytes("RGB", (image.width, image.height), bytes(image.rgb))


VARIANTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "large tower, Qwen3": (hf.Qwen3Config(**TEXT, head_dim=16), LARGE_TOWER, {}),
    "last norm, Llama": (hf.LlamaConfig(**TEXT), {"use_mean_pooling": False}, {}),
    "an earlier layer": (
        hf.Qwen2Config(**TEXT), {"use_mean_pooling": False}, {"vision_feature_layer": -2},
    ),
    "a mask token": (hf.Qwen2Config(**TEXT), {"use_mask_token": True}, {"vision_feature_layer": 2}),
    "16 patches per token": (hf.Qwen2Config(**TEXT), {}, {"downsample_ratio": 0.25}),
    "tied": (
        hf.Qwen2Config(**TEXT, tie_word_embeddings=True), {}, {"tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_kinds_of_models_for_transformers(name: str, tmp_path: Path) -> None:
    text, vision, config = VARIANTS[name]
    same_as_transformers(variant(tmp_path / "model", text, vision, **config))


def test_a_head_of_its_own_counts_more_than_a_config_that_says_tied(tmp_path: Path) -> None:
    """Older versions of transformers did not write the field, and its default is now true."""
    folder = variant(tmp_path / "model", hf.Qwen2Config(**TEXT), {})
    edit_json("config.json", lambda c: c.pop("tie_word_embeddings"))(folder)
    assert read_config(folder).tie_word_embeddings
    same_as_transformers(folder)


ORIGINALS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "large tower, Qwen3": (hf.Qwen3Config(**TEXT, head_dim=16), LARGE_TOWER, False),
    "Llama": (hf.LlamaConfig(**TEXT), {"attention_bias": True}, False),
    "InternLM2": (
        hf.LlamaConfig(**TEXT, rope_scaling={"type": "dynamic", "factor": 2.0}), {"attention_bias": True},
        True,
    ),
    "InternLM2 with bias": (hf.LlamaConfig(**TEXT, attention_bias=True), {}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", others_slow(ORIGINALS, ["large tower, Qwen3", "InternLM2"]))
def test_both_layouts_give_the_same_answers(name: str, tmp_path: Path) -> None:
    """To the last bit: the same numbers are read into the same places."""
    text, vision, internlm2 = ORIGINALS[name]
    folder = variant(tmp_path / "model", text, vision)
    original = to_original(Path(shutil.copytree(folder, tmp_path / "original")), internlm2=internlm2)
    names = " ".join(load_file(original / WEIGHTS))
    assert {name.split(".")[0] for name in names.split()} == {"vision_model", "mlp1", "language_model"}
    assert ("k_proj" in names) is not internlm2
    prompt = ask("what is it?", picture(3, 150, 70), picture(4, 50, 60))
    first, second = answer(folder, prompt), answer(original, prompt)
    assert first.token_ids == second.token_ids
    assert [e.logprob for e in first.logprobs[0]] == [e.logprob for e in second.logprobs[0]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("internvl_chat", tmp_path_factory.mktemp("original"))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in the original layout, for the test to change."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


IMAGE_TEXT = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>\n"


@pytest.mark.parametrize(
    "template",
    [None, INTERNVL_TEMPLATE, INTERNVL_TEMPLATE.replace("<IMG_CONTEXT>", "<image>")],
    ids=["content as text", "image token", "old marker"],
)
def test_prompts(copy: Path, template: str | None) -> None:
    """The characters of markers and tokens in messages are text, whatever the template looks like."""
    if template is not None:
        (copy / "chat_template.jinja").write_text(template)
    turns = ((ImagePart(picture(1, 50, 50)), TextPart("hi <image> <IMG_CONTEXT>")), (TextPart("well"),))
    messages = [Message(role, parts) for role, parts in zip(("user", "assistant"), turns, strict=True)]
    with Engine.from_pretrained(str(copy), **SETTINGS) as engine:
        builder = engine.parts.preparer.builder
        prepared = builder.build(ChatPrompt(tuple(messages)))
        text = builder.tokenizer.decode(prepared.ids, skip_special_tokens=False)
        assert text == (
            f"<|im_start|>user\n{IMAGE_TEXT}hi <image> <IMG_CONTEXT><|im_end|>\n"
            "<|im_start|>assistant\nwell<|im_end|>\n<|im_start|>assistant\n"
        )
        token = engine.runner.model.image_token_id
        assert prepared.ids.count(token) == prepared.image_tokens == 4


def test_answers_end_with_the_turn(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    edit_json("config.json", lambda c: c["llm_config"].update(eos_token_id=7))(copy)
    assert load_model(str(copy), EngineConfig.of(**SETTINGS)).tokenizer.eos_ids == {2}


LONG_AGO = {
    "max_length": 20, "temperature": 1.0, "top_p": 1.0, "do_sample": False, "num_beams": 1,
    "return_dict": True, "torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.37.2",
    "torchscript": False, "_name_or_path": "pretrained/llm", "repetition_penalty": 1.0, "prefix": None,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 70, "moe_config": None,
}  # fmt: skip
"""Fields in `llm_config` of published checkpoints that do not concern the model."""


def test_other_fields_of_published_configs(copy: Path) -> None:
    before = read_config(copy).text_config.to_dict()
    edit_json("config.json", lambda c: c["llm_config"].update(LONG_AGO))(copy)
    after = read_config(copy).text_config.to_dict()
    shared = before.keys() - LONG_AGO.keys() - {"dtype"}
    assert {name: after[name] for name in shared} == {name: before[name] for name in shared}


def config(change: Callable[[dict[str, Any]], Any]) -> Edit:
    return edit_json("config.json", change)


REFUSALS: dict[str, tuple[Edit, type[ModelError], str]] = {
    "another shuffle": (config(lambda c: c.update(ps_version="v1")), UnsupportedModel, "accepted: 'v2'"),
    "no shuffle version": (config(lambda c: c.pop("ps_version")), UnsupportedModel, "ps_version is 'v1'"),
    "adapters": (config(lambda c: c.update(use_llm_lora=16)), UnsupportedModel, "use_llm_lora is 16"),
    "squares": (config(lambda c: c.update(pad2square=True)), UnsupportedModel, "pad2square is True"),
    "another size": (config(lambda c: c.update(force_image_size=112)), UnsupportedModel,
        "force_image_size is 112; accepted: 56"),
    "another tower": (config(lambda c: c["vision_config"].update(model_type="siglip")), UnsupportedModel,
        "accepted: 'intern_vit_6b'"),
    "another decoder": (config(lambda c: c["llm_config"].update(architectures=["Phi3ForCausalLM"])),
        UnsupportedModel, r"\['Phi3ForCausalLM'\]; supported: Qwen2ForCausalLM, Qwen3ForCausalLM, Llama"),
    "no decoder": (config(lambda c: c.pop("llm_config")), UnsupportedModel, "architectures is None"),
    "a decoder that is a list": (config(lambda c: c.update(llm_config=[])), CheckpointError,
        "llm_config is"),
    "another epsilon": (config(lambda c: c["vision_config"].update(layer_norm_eps=1e-5,
        qk_normalization=True)), UnsupportedModel, "layer_norm_eps is 1e-05"),
    "another norm": (config(lambda c: c["vision_config"].update(norm_type="batch_norm")), UnsupportedModel,
        "norm_type 'batch_norm'"),
    "a layer that is not there": (config(lambda c: c.update(select_layer=-9)), UnsupportedModel,
        "vision_feature_layer -9 with 3 layers"),
    "quantized": (config(lambda c: c.update(quantization_config={"quant_method": "hqq"})), UnsupportedModel,
        "is quantized"),
    "a wrong number": (config(lambda c: c["llm_config"].update(num_hidden_layers=-1)), CheckpointError,
        "llm_config.num_hidden_layers is -1"),
    "a wrong type": (config(lambda c: c["llm_config"].update(rms_norm_eps="small")), CheckpointError,
        "config.json cannot be used"),
    "a tokenizer that is code": (edit_json("tokenizer_config.json", lambda c: c.update(
        tokenizer_class="InternLM2Tokenizer", auto_map={"AutoTokenizer": ["tokens.Tokenizer", None]})),
        CheckpointError, "no usable tokenizer: .* contains custom code"),
    "no image token": (lambda folder: (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace("<IMG_CONTEXT>", "<OTHER>")) and None,
        CheckpointError, "the tokenizer has no token <IMG_CONTEXT>"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(copy: Path, name: str) -> None:
    edit, kind, message = REFUSALS[name]
    edit(copy)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(copy), EngineConfig.of(**SETTINGS))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy 'full'"),
        ({"vision_feature_layer": [1, 2]}, r"vision_feature_layer \[1, 2\]"),
        ({"vision_config": {**VISION, "image_size": [56, 112]}}, "accepted: squares"),
        ({"vision_config": {**VISION, "use_absolute_position_embeddings": False}}, "accepted: true"),
    ],
    ids=str,
)
def test_refusals_for_transformers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write("internvl", tmp_path)
    edit_json("config.json", lambda c: c.update(change))(folder)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(folder), EngineConfig.of(**SETTINGS))


@pytest.mark.parametrize("wrong", ["rows", "twice", "missing"])
def test_fused_tensors_of_wrong_files(copy: Path, wrong: str) -> None:
    tensors = load_file(copy / WEIGHTS)
    name = "vision_model.encoder.layers.1.attn.qkv.weight"
    fused = tensors.pop(name)
    message = "3 tensors are missing, among them"
    if wrong == "rows":
        tensors[name], message = fused[:-1].contiguous(), r"has shape \[95, 32\], the configuration says \[96"
    elif wrong == "twice":
        tensors[name] = fused
        tensors["vision_tower.encoder.layer.1.attention.k_proj.weight"] = fused[:32].clone()
        message = "is there a second time"
    save_file(tensors, copy / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(copy), EngineConfig.of(**SETTINGS))


def test_ids_of_added_tokens(tmp_path: Path) -> None:
    """Three files may declare them. Tokenizers without tokenizer.json have one of the other two."""
    assert added_ids(tmp_path) == {}
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<a>", "id": 5}]}')
    (tmp_path / "added_tokens.json").write_text('{"<b>": 6, "<c>": "x", "<d>": -1}')
    content = {"added_tokens_decoder": {"7": {"content": "<e>"}, "x": {"content": "<f>"}, "8": "<g>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert added_ids(tmp_path) == {"<a>": 5, "<b>": 6, "<e>": 7}


@pytest.mark.kernels
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8_in_bfloat16(original: Path, kernels: str) -> None:
    """Quantized weights change the probabilities a little, and more than not at all."""
    prompt = ask("what is it?", picture(3, 150, 70))
    exact = answer(original, prompt)
    rounded = answer(original, prompt, dtype="bfloat16", quantization="int8", kernels=kernels)
    assert len(rounded.token_ids[0]) == TOKENS
    first, second = (done.logprobs[0][0].logprob for done in (exact, rounded))
    assert first != second
    assert first == pytest.approx(second, abs=0.3)


@pytest.mark.parametrize("method", ["uniform", "dpp_query", "tome", "fastv"])
def test_fewer_visual_tokens(original: Path, method: str) -> None:
    budget = PixelBudget(visual=VisualTokens(method, keep=0.5))
    prompt = ask("what is it?", picture(3, 150, 70), budget=budget)
    with Engine.from_pretrained(str(original), **SETTINGS) as engine:
        plain = engine.parts.preparer.builder.build(ask("what is it?", picture(3, 150, 70)))
        done = engine.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True)
        assert plain.image_tokens == 12  # two tiles and the whole picture, of 4 tokens each
        assert (done.usage.image, done.usage.prompt) == (6, len(plain.ids) - 6)
        engine.check_integrity()


@pytest.mark.parametrize(("thumbnail", "tiles"), [(True, 3), (False, 2)])
def test_rows_of_tiles_with_and_without_a_view_of_the_whole(copy: Path, thumbnail: bool, tiles: int) -> None:
    edit_json("config.json", lambda c: c.update(use_thumbnail=thumbnail))(copy)
    loaded = load_model(str(copy), EngineConfig.of(**SETTINGS))
    image = picture(3, 150, 70)
    plan = loaded.processor.plan(150, 70, PixelBudget())
    with torch.inference_mode():
        features = loaded.model.encode(loaded.processor.process(image, plan))
    assert len(features.embeds) == plan.tokens == 4 * tiles
    shape = loaded.model.visual_shape(plan)
    assert (shape.patches, shape.rows, shape.projector_rows) == (16 * tiles, 17 * tiles, 4 * tiles)
    assert shape.pairs == tiles * 3 * 17**2


def test_videos_are_refused_by_name(original: Path) -> None:
    with Engine.from_pretrained(str(original), **SETTINGS) as engine:
        assert engine.info.input_modalities == ("text", "image")
        clip = VideoPart(video_of_images([picture(seed) for seed in range(4)]))
        with pytest.raises(InvalidRequest, match="this model takes no videos; models that do: Qwen3.5"):
            engine.generate(ChatPrompt((Message("user", (clip, TextPart("what happens?"))),)))
