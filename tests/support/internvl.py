"""Rewrites tiny InternVL checkpoints of transformers into the original layout of InternVL's authors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
TEXT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A template as in checkpoints of the original layout: the content of a message must be text."""
_NAMES = (
    (r"^vision_tower\.", "vision_model."),
    (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
    (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.(qkv)\.", r".attn.\1."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk])_norm\.", r".attn.\1_norm."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_([12])$", r".ls\1"),
)
_INTERNLM2_NAMES = (
    (r"\.embed_tokens\.", ".tok_embeddings."),
    (r"^language_model\.lm_head\.", "language_model.output."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)


def to_original(folder: Path, *, internlm2: bool = False) -> Path:
    """Rewrite the checkpoint in a folder. internlm2: its decoder, a Llama, is called InternLM2."""
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    tensors = load_file(folder / WEIGHTS)
    _fuse(tensors, r"(vision_tower\..*\.attention)\.q_proj\.", "qkv", 1)
    if internlm2:
        _fuse(
            tensors,
            r"(language_model\..*)\.self_attn\.q_proj\.",
            "attention.wqkv",
            text["num_key_value_heads"],
        )
    rules = (*_NAMES, *_INTERNLM2_NAMES) if internlm2 else _NAMES
    save_file({_rename(name, rules): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(original_config(text, vision, internlm2=internlm2)))
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "crop_size": 56, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225], "resample": 3, "size": 56,
    }))  # fmt: skip
    (folder / "processor_config.json").unlink()
    (folder / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    return folder


def original_config(text: dict[str, Any], vision: dict[str, Any], *, internlm2: bool) -> dict[str, Any]:
    """config.json of the original layout, for the sections of one of transformers."""
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    rope = dict(text.pop("rope_parameters"))
    llm = {**text, "architectures": [names[text["model_type"]]], "rope_theta": rope.pop("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        llm["rope_scaling"] = {"type": rope["rope_type"], **rope}
    if internlm2:
        llm |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
        llm |= {
            "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
            "attn_implementation": "eager",
        }
        llm["bias"] = llm.pop("attention_bias")
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat", "downsample_ratio": 0.5, "dynamic_image_size": True,
        "force_image_size": 56, "max_dynamic_patch": 12, "min_dynamic_patch": 1, "pad2square": False,
        "ps_version": "v2", "select_layer": -1, "template": "internvl2_5", "use_backbone_lora": 0,
        "use_llm_lora": 0, "use_thumbnail": True, "llm_config": llm,
        "vision_config": {
            "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "image_size": 56,
            "patch_size": 14, "qkv_bias": vision["attention_bias"], "qk_normalization": vision["use_qk_norm"],
            "drop_path_rate": 0.1, "use_flash_attn": True,
            **{name: vision[name] for name in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
                "norm_type", "layer_norm_eps",
            )},
        },
    }  # fmt: skip


def _rename(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _fuse(tensors: dict[str, torch.Tensor], pattern: str, fused: str, groups: int) -> None:
    """Replace queries, keys and values by one tensor, in which each group has its part of all three."""
    for name in [name for name in tensors if re.match(pattern, name)]:
        match = re.match(pattern, name)
        assert match is not None
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        rows = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        kind = name.rpartition(".")[2]
        tensors[f"{match[1]}.{fused}.{kind}"] = torch.cat(rows, dim=1).flatten(0, 1).contiguous()
