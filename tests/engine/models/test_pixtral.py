"""Tests of the models with a Pixtral tower, beside those that all architectures have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from fovea import Engine
from fovea.core.errors import InvalidRequest, UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model, read_config
from fovea.engine.models.pixtral import gather_squares
from fovea.engine.models.registry import architecture
from fovea.engine.models.tokenizer import load_tokenizer
from fovea.engine.request.inputs import to_image
from fovea.kernels.native.build import library
from tests.support.checkpoints import write
from tests.support.programs import need_kernels
from tests.support.reference import Reference
from tests.support.thorough import others_slow

FAMILY = ("pixtral", "mistral3", "lighton_ocr")
PLAIN = EngineConfig.of(dtype="float32", device="cpu", threads=1, kv_blocks=64)
ANSWER: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def ask(text: str, *images: Image.Image) -> ChatPrompt:
    parts = [ImagePart(to_image(image)) for image in images]
    return ChatPrompt((Message("user", (*parts, TextPart(text))),))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def ids_and_answer(folder: Path, prompt: ChatPrompt, **settings: Any) -> tuple[list[int], list[int]]:
    options = {"dtype": "float32", "kv_cache_mib": 16, "threads": 1, **settings}
    with Engine.from_pretrained(str(folder), **options) as engine:
        ids = engine.parts.preparer.builder.build(prompt).ids
        return ids, list(engine.generate(prompt, **ANSWER).token_ids[0])


@pytest.mark.parametrize("name", FAMILY)
def test_encoder_output_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Images of odd shapes, one by one; transformers encodes them together, padded."""
    folder = write(name, tmp_path)
    loaded, reference = load_model(str(folder), PLAIN), Reference(folder)
    images = [picture(130, 90), picture(30, 196, 1), picture(400, 33, 2)]
    inputs = reference.inputs([], images)
    with torch.inference_mode():
        theirs = reference.model.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"])
        for image, expected in zip(map(to_image, images), theirs.pooler_output, strict=True):
            plan = loaded.processor.plan(image.width, image.height, PixelBudget())
            ours = loaded.model.encode(loaded.processor.process(image, plan)).embeds
            assert ours.shape == (plan.tokens, 64)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", others_slow([-2, [1, -1], [3, 2, 0]], [-2, [3, 2, 0]]), ids=str)
def test_other_feature_layers_of_pixtral(layer: int | list[int], tmp_path: Path) -> None:
    """If several layers are named, the projector reads their outputs side by side."""
    folder = write("pixtral", tmp_path)
    edit_config(folder, lambda content: content.update(vision_feature_layer=layer))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("multi_modal_projector.linear_1.weight"))
    count = len(layer) if isinstance(layer, list) else 1
    tensors[name] = torch.randn(64, 32 * count) * 0.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    image, prompt = picture(70, 50), ask("what is it?", picture(70, 50))
    ids, ours = ids_and_answer(folder, prompt)
    assert ours == Reference(folder).generate(ids, [image], len(ours))


def test_layers_of_mistral3_below_the_last(tmp_path: Path) -> None:
    folder = write("mistral3", tmp_path)
    edit_config(folder, lambda content: content.update(vision_feature_layer=-2))
    image, prompt = picture(70, 50), ask("what is it?", picture(70, 50))
    ids, ours = ids_and_answer(folder, prompt)
    assert ours == Reference(folder).generate(ids, [image], len(ours))
    assert len(load_model(str(folder), PLAIN).model.vision.transformer.layers) == 2  # type: ignore[union-attr]


def test_squares_of_three_patches(tmp_path: Path) -> None:
    """A slice of rows holds a multiple of the nine patches that become one token."""
    config = hf.AutoConfig.from_pretrained(write("mistral3", tmp_path / "two"))
    config.spatial_merge_size = 3
    torch.manual_seed(1)
    theirs = hf.Mistral3ForConditionalGeneration(config)
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.2)
    folder = write("mistral3", tmp_path / "three")
    theirs.save_pretrained(folder)
    (folder / "processor_config.json").write_text("{}")
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    preprocessor["size"] = {"longest_edge": 630}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    loaded, image = load_model(str(folder), PLAIN), to_image(picture(600, 500))
    plan = loaded.processor.plan(image.width, image.height, PixelBudget())
    assert plan.grid == (1, 36, 45)
    processed = loaded.processor.process(image, plan)
    squares = processed.arrays["pixel_values"].reshape(36, 45, 3, 14, 14).transpose(2, 0, 3, 1, 4)
    pixels = torch.from_numpy(np.ascontiguousarray(squares)).view(1, 3, 504, 630)
    with torch.inference_mode():
        expected = theirs.eval().get_image_features(pixels, image_sizes=torch.tensor([[504, 630]]))
        ours = loaded.model.encode(processed).embeds
    torch.testing.assert_close(ours, expected.pooler_output[0], rtol=1e-3, atol=1e-4)


def test_gathering_leaves_out_patches_beyond_whole_squares() -> None:
    rows = torch.arange(15).view(15, 1)
    assert gather_squares(rows, (3, 5), 2).flatten().tolist() == [0, 1, 5, 6, 2, 3, 7, 8]
    assert gather_squares(rows, (3, 5), 1).flatten().tolist() == list(range(15))


@pytest.mark.parametrize("untied", [True, False], ids=["a head of its own", "no head"])
def test_mistral3_does_not_say_whether_its_head_is_tied(untied: bool, tmp_path: Path) -> None:
    """Published files hold a head, and no `tie_word_embeddings`, which is true by default."""
    folder = write("mistral3", tmp_path)
    edit_config(folder, lambda content: content.pop("tie_word_embeddings"))
    if not untied:
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    model = load_model(str(folder), PLAIN).model
    assert model.head.tied is not untied
    ids, ours = ids_and_answer(folder, ask("the red circle"))
    assert ours == Reference(folder).generate(ids, [], len(ours))


def ministral3(folder: Path, original: int) -> Path:
    """A Mistral 3 with the text model of Ministral 3, which was trained on `original` positions."""
    write("mistral3", folder)
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": original,
        "llama_4_scaling_beta": 0.7,
    }  # fmt: skip
    changes = {"model_type": "ministral3", "rope_parameters": yarn, "max_position_embeddings": 1024}
    edit_config(folder, lambda content: content["text_config"].update(changes))
    return folder


@pytest.mark.parametrize("original", others_slow([16, 64, 256], [16, 256]))
def test_ministral3_scales_queries_by_their_position(original: int, tmp_path: Path) -> None:
    """The prompt has 80 tokens; the scale changes inside it, in the answer, or not at all."""
    folder = ministral3(tmp_path, original)
    image, prompt = picture(140, 120), ask("what is it?" * 6, picture(140, 120))
    ids, ours = ids_and_answer(folder, prompt, max_step_tokens=32)
    assert 64 < len(ids) < 104
    assert ours == Reference(folder).generate(ids, [image], len(ours))


def test_queries_are_scaled_when_layers_are_one_call(tmp_path: Path) -> None:
    """Layers in one call compute steps before the first scale, the layers one by one those after it."""
    need_kernels()
    folder = ministral3(tmp_path, 16)
    config = hf.AutoConfig.from_pretrained(folder)
    config.text_config.head_dim = 32
    torch.manual_seed(2)
    theirs = hf.Mistral3ForConditionalGeneration(config).to(torch.bfloat16)
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.12)
    theirs.save_pretrained(folder)
    prompt = ask("the red circle is left of the blue square")
    with Engine.from_pretrained(str(folder), dtype="bfloat16", kernels="native", kv_cache_mib=16) as engine:
        decoder = engine.runner.model.decoder
        stack = decoder._stack
        assert stack is not None, "the decoder does not run as one call"
        at_once = engine.generate(prompt, **ANSWER, logprobs=True)
        decoder._stack = None
        engine.clear_caches()
        one_by_one = engine.generate(prompt, **ANSWER, logprobs=True)
        decoder._stack = stack
    assert at_once.usage.prompt < 16 < at_once.usage.prompt + ANSWER["max_tokens"]
    assert at_once.token_ids == one_by_one.token_ids
    assert [e.logprob for e in at_once.logprobs[0]] == [e.logprob for e in one_by_one.logprobs[0]]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("pixtral", {"vision_feature_select_strategy": "default"}, "no class token; accepted: full"),
        ("pixtral", {"vision_feature_layer": 4}, "vision_feature_layer 4 with 3 layers"),
        ("mistral3", {"vision_feature_layer": [1, 2]}, "mistral3 reads one layer"),
        ("mistral3", {"vision_config": {"model_type": "clip_vision_model"}}, "supported: pixtral"),
        ("lighton_ocr", {"vision_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}},
         "RoPE of type 'linear' in the vision tower"),
        ("lighton_ocr", {"vision_config": {"hidden_size": 24}}, "heads of a multiple of 4 columns"),
        ("lighton_ocr", {"vision_config": {"patch_size": [14, 14]}}, "supported: one integer"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_configurations(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path)

    def merge(content: dict[str, Any]) -> None:
        for key, value in change.items():
            if isinstance(value, dict):
                content[key].update(value)
            else:
                content[key] = value

    edit_config(folder, merge)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(folder), PLAIN)


def test_the_tower_tells_pixtral_from_llava() -> None:
    assert architecture("llava", "pixtral").name == "Pixtral"
    assert architecture("llava", "clip_vision_model").name == "LLaVA-1.5"
    assert architecture("llava").name == "LLaVA-1.5"
    assert architecture("mistral3", "pixtral").name == architecture("mistral3").name


def test_a_pixtral_without_a_chat_template_does_not_get_llavas(tmp_path: Path) -> None:
    folder = write("pixtral", tmp_path)
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_model(str(folder), PLAIN).tokenizer
    with pytest.raises(InvalidRequest, match="template"):
        tokenizer.render(ask("what is it?").messages)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("4.50.0", ["Hello", "World"]),
        pytest.param("5.2.0", ["HelloWorld"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_faulty_pattern_of_mistrals_old_tokenizers_is_replaced(
    version: str, words: list[str], tmp_path: Path
) -> None:
    """transformers recognises such a tokenizer by its version and by more than 100,000 tokens."""
    folder = write("mistral3", tmp_path)
    alphabet = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    raw = Tokenizer(models.BPE(alphabet | {f"dummy {number}": number for number in range(256, 100_100)}, []))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="dummy 300").save_pretrained(folder)
    edit_config(folder, lambda content: content.update(transformers_version=version))
    backend = load_tokenizer(folder, read_config(folder)).backend
    assert backend is not None
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("HelloWorld")] == words


@pytest.mark.parametrize("name", others_slow(FAMILY, ["mistral3"]))
def test_int8_in_bfloat16(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path, dtype=torch.bfloat16)
    prompt = ask("what is it?", picture(90, 120))
    for kernels in ("torch", *(("native",) if library() is not None else ())):
        settings = {"dtype": "bfloat16", "device": "cpu", "kernels": kernels, "quantization": "int8"}
        _, ours = ids_and_answer(folder, prompt, **settings)
        assert len(ours) == ANSWER["max_tokens"]


def test_lighton_ocr_with_the_model_type_of_mistral_3(tmp_path: Path) -> None:
    """LightOnOCR was published as mistral3; only the class in `architectures` tells the two apart.

    The image got Mistral's line breaks between its rows, which the model has never seen.
    """
    folder = write("lighton_ocr", tmp_path)
    prompt = ask("what?", picture(130, 90))
    expected = ids_and_answer(folder, prompt)
    edit_config(
        folder,
        lambda config: config.update(
            model_type="mistral3", architectures=["LightOnOCRForConditionalGeneration"]
        ),
    )
    assert ids_and_answer(folder, prompt) == expected
