"""Writes tiny checkpoints as GGUF files, in the conventions of llama.cpp's converter.

Names of tensors come from the package gguf. What the converter does beside renaming is written here: rows of
queries and keys of Llama that rotate together become neighbours, 1 is added to Gemma's norms, towers of Qwen
have q, k and v apart and one tensor for each frame of a patch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[Any]
Encode = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType | None]]
"""From the name in the file and the values of a tensor to its data and its type; None: as the data is."""
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen2_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen2_5_vl_text": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": gguf.MODEL_ARCH.QWEN3VL,
    "qwen3_vl_moe_text": gguf.MODEL_ARCH.QWEN3VLMOE,
}
PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "gemma3": "gemma3",
    "internvl": "internvl",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "llava": "mlp",
    "pixtral": "pixtral",
    "mistral3": "pixtral",
}
"""clip.projector_type by the names of tiny checkpoints."""


def plain(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
    """Keep all values as float32."""
    return values, None


def quantized(kind: str) -> Encode:
    """Store matrices of layers in a type that the package can quantize to, if it fits their rows."""
    number = gguf.GGMLQuantizationType[kind]

    def encode(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        if values.ndim != 2 or values.shape[1] % gguf.GGML_QUANT_SIZES[number][0]:
            return values, None
        return gguf.quants.quantize(values, number), number

    return encode


def write_model(folder: Path, path: Path, encode: Encode = plain, *, split: int = 0) -> Path:
    """Write the text model of a checkpoint folder. split: tensors of each file; 0: one file."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    arch = ARCHITECTURES[text["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=split)
    tensors = dict(_text_tensors(folder, text))
    _write_text_config(writer, text, tensors)
    _write_tokenizer(writer, folder, tensors["model.embed_tokens.weight"].shape[0])
    names = gguf.get_tensor_name_map(arch, 64)
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".")
        ours = names.get_name(stem)
        assert ours is not None, name
        _add(writer, f"{ours}.{kind}", _converted(arch, name, values, text), encode)
    _finish(writer)
    return path


def write_tower(folder: Path, path: Path, architecture: str, encode: Encode = plain, **changes: Any) -> Path:
    """Write the vision tower of a checkpoint folder. architecture: its name in `checkpoints.ARCHITECTURES`.

    changes: entries of "clip.vision." that differ from the checkpoint's.
    """
    config = json.loads((folder / "config.json").read_text())
    images = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    _write_tower_config(writer, config, images, architecture, changes)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    heads = config["vision_config"].get("num_attention_heads")
    deep = config["vision_config"].get("deepstack_visual_indexes", [])
    if architecture == "llava":
        # The model does not use the last block, so files do not have it.
        last = config["vision_config"]["num_hidden_layers"] - 1
        unused = (f".layers.{last}.", "post_layernorm")
    for name, values in _tensors(folder).items():
        if not any(part in name for part in ("vision", "visual", "projector", "connector")):
            continue
        if architecture == "llava" and any(part in name for part in unused):
            continue
        for found, part in _tower_parts(_usual(name, architecture), values, names, deep):
            if architecture in ("pixtral", "mistral3") and (".attn_q." in found or ".attn_k." in found):
                part = paired(part, heads)
            if found == "mm.soft_emb_norm.weight":
                part = part + 1
            _add(writer, found, part, encode)
    _finish(writer)
    return path


def paired(values: Array, heads: int) -> Array:
    """Make rows i and i + n / 2 of every head of n rows neighbours."""
    rows = values.reshape(heads, 2, -1, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _tensors(folder: Path) -> dict[str, Array]:
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _text_tensors(folder: Path, text: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors of the text model under the names of a model for text alone."""
    found = {}
    for name, values in _tensors(folder).items():
        short = name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")
        short = short.replace("model.text_model.", "model.").replace("language_model.lm_head", "lm_head")
        if not short.startswith(("model.embed_tokens", "model.layers", "model.norm", "lm_head")):
            continue
        if short.endswith("experts.gate_up_proj"):
            stem, half = short.removesuffix(".gate_up_proj"), values.shape[1] // 2
            found[f"{stem}.gate_proj.weight"] = values[:, :half]
            found[f"{stem}.up_proj.weight"] = values[:, half:]
        elif short.endswith("experts.down_proj"):
            found[f"{short}.weight"] = values
        else:
            found[short] = values
    return found


def _converted(arch: gguf.MODEL_ARCH, name: str, values: Array, text: Mapping[str, Any]) -> Array:
    if arch == gguf.MODEL_ARCH.LLAMA and ".q_proj." in name:
        return paired(values, text["num_attention_heads"])
    if arch == gguf.MODEL_ARCH.LLAMA and ".k_proj." in name:
        return paired(values, text["num_key_value_heads"])
    if arch == gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
        return values + 1
    return values


def _write_text_config(
    writer: gguf.GGUFWriter, text: Mapping[str, Any], tensors: Mapping[str, Array]
) -> None:
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    rope = text["rope_parameters"]
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, size))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if text["model_type"] == "gemma3_text":
        writer.add_sliding_window(text["sliding_window"])
        flags = [kind == "sliding_attention" for kind in text["layer_types"]]
        writer.add_sliding_window_pattern(flags)
    experts = text.get("num_experts") or text.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])


def _llama3_divisors(rope: Mapping[str, Any], size: int) -> Array:
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    old, low, high = (
        rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    )  # fmt: skip
    smooth = np.clip((old / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path, rows: int) -> None:
    """Write a byte-level tokenizer, with padding up to the rows of the embedding table."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ids: dict[str, int] = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    ids |= {token: added[token]["id"] for token in added}
    words = {number: token for token, number in ids.items()}
    tokens = [words.get(number, f"[PAD{number}]") for number in range(max(rows, len(words)))]
    kinds = [
        (3 if added[token]["special"] else 4) if token in added else 1 if token in ids else 5
        for token in tokens
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_pad_token_id(ids[settings["pad_token"]])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.exists() else settings["chat_template"])


def _write_tower_config(
    writer: gguf.GGUFWriter,
    config: Mapping[str, Any],
    images: Mapping[str, Any],
    architecture: str,
    changes: Mapping[str, Any],
) -> None:
    vision, text = config["vision_config"], config["text_config"]
    width = vision.get("embed_dim") or vision["hidden_size"]
    size = vision.get("image_size", 560)
    patch = vision["patch_size"]
    entries = {
        "image_size": size[0] if isinstance(size, list) else size,
        "patch_size": patch[0] if isinstance(patch, list) else patch,
        "embedding_length": width,
        "feed_forward_length": vision.get("intermediate_size") or vision["hidden_size"],
        "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "projection_dim": text["hidden_size"],
        "attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        **changes,
    }
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", PROJECTORS[architecture])
    act = vision.get("hidden_act", "gelu")
    writer.add_bool("clip.use_gelu", act.startswith("gelu"))
    writer.add_bool("clip.use_silu", act == "silu")
    if architecture == "qwen2_5_vl":
        entries.setdefault("n_wa_pattern", vision["fullatt_block_indexes"][0] + 1)
    if architecture in ("qwen3_vl", "qwen3_vl_moe"):
        flags = [n in vision["deepstack_visual_indexes"] for n in range(vision["depth"])]
        writer.add_array("clip.vision.is_deepstack_layers", flags)
        entries.setdefault("spatial_merge_size", vision["spatial_merge_size"])
    for name, value in entries.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"clip.vision.{name}", value)
    writer.add_array("clip.vision.image_mean", images["image_mean"])
    writer.add_array("clip.vision.image_std", images["image_std"])


def _usual(name: str, architecture: str) -> str:
    """The name of a tensor as the package gguf knows it. transformers has renamed some since."""
    for new, old in (
        ("model.visual.", "visual."),
        ("multi_modal_projector.layer_norm", "mlp1.0"),
        ("multi_modal_projector.linear_1", "mlp1.1" if architecture == "internvl" else ""),
        ("multi_modal_projector.linear_2", "mlp1.3" if architecture == "internvl" else ""),
        ("mm_input_projection_weight", "mm_input_projection.weight"),
    ):
        if old:
            name = name.replace(new, old)
    if architecture in ("gemma3", "llava") and name.startswith("vision_tower."):
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if architecture == "internvl":
        name = name.replace("vision_tower.", "model.vision_tower.")
        if name.endswith(("lambda_1", "lambda_2", "position_embeddings")):
            name += ".weight"
    return name


def _tower_parts(
    name: str, values: Array, names: gguf.TensorNameMap, deep: list[int]
) -> list[tuple[str, Array]]:
    """The tensors of a file that hold one tensor of the checkpoint."""
    if name.endswith("patch_embed.proj.weight"):
        frames = (("v.patch_embd.weight", 0), ("v.patch_embd.weight.1", 1))
        return [(found, values[:, :, frame]) for found, frame in frames]
    if ".deepstack_merger_list." in name:
        number, part, kind = name.split(".")[2:]
        short = part.replace("linear_", "")
        return [(f"v.deepstack.{deep[int(number)]}.{short}.{kind}", values)]
    if name.startswith("visual.merger.linear_fc"):
        number, kind = {"1": 0, "2": 2}[name[23]], name.rpartition(".")[2]
        return [(f"mm.{number}.{kind}", values)]
    if name.startswith("visual.merger.norm."):
        return [(f"v.post_ln.{name.rpartition('.')[2]}", values)]
    if ".qkv." in name and ".linear_fc" not in name and "fc1" not in name:
        whole = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert whole is not None, name
        thirds = zip("qkv", np.split(values, 3), strict=True)
        return [(whole.replace("attn_qkv", f"attn_{part}"), third) for part, third in thirds]
    found = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(name)
    assert found is not None, name
    return [(found, values.squeeze())]


def _add(writer: gguf.GGUFWriter, name: str, values: Array, encode: Encode) -> None:
    data, kind = encode(name, np.ascontiguousarray(values))
    writer.add_tensor(name, data, raw_dtype=kind)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
