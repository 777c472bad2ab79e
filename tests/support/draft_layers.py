"""Writes EAGLE-3 layers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fovea.engine.files import read_json
from fovea.engine.load import resolve


def random_eagle3(folder: Path, target: str = "fovea-tiny", *, vocabulary: int = 0, **changed: Any) -> Path:
    """Write a layer of a target's width.

    vocabulary: rows of a head of its own, with a table of ids; 0: it shares the target's head.
    changed: values that replace those of the configuration.
    """
    text = read_json(resolve(target) / "config.json")["text_config"]
    hidden, size = text["hidden_size"], text["head_dim"]
    heads, kv_heads, inner = text["num_attention_heads"], text["num_key_value_heads"], 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": text["rope_parameters"],
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        **changed,
    }
    shapes = {
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "fc": (hidden, 3 * hidden),
    }
    random = torch.Generator().manual_seed(5)
    tensors = {f"{name}.weight": torch.randn(shape, generator=random) / 16 for name, shape in shapes.items()}
    if vocabulary:
        tensors["lm_head.weight"] = torch.randn((vocabulary, hidden), generator=random) / 16
        used = torch.randperm(text["vocab_size"], generator=random)[:vocabulary].sort().values
        tensors["d2t"] = used - torch.arange(vocabulary)
        tensors["t2d"] = torch.zeros(text["vocab_size"], dtype=torch.bool).index_fill(0, used, True)
        config["draft_vocab_size"] = vocabulary
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
