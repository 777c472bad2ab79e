"""Tiny random checkpoints of models for text alone, in the format that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from tests.support.checkpoints.folders import randomise
from tests.support.checkpoints.parts import decoder
from tests.support.checkpoints.templates import QWEN_TEMPLATE
from tests.support.checkpoints.tokens import tokenizer


def _gemma3() -> Any:
    config = hf.Gemma3TextConfig(
        **decoder(
            head_dim=32, query_pre_attn_scalar=24, sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        )
    )  # fmt: skip
    model = hf.Gemma3ForCausalLM(config)
    # As in `gemma.gemma3`: else the model repeats its last token, because its head is the embedding table.
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.fill_(4)
        layer.post_feedforward_layernorm.weight.data.fill_(4)
    return model


TEXT_MODELS: Mapping[str, Callable[[], Any]] = {
    # SmolLM2's ways: a tied head and no biases; Llama 3's ways: scaled rotary frequencies.
    "llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **decoder(tie_word_embeddings=True),
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**decoder(head_dim=24, sliding_window=16))),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**decoder())),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**decoder(head_dim=32))),
    "gemma3_text": _gemma3,
}  # fmt: skip
"""A function that builds each model, by its model_type."""


def write_text(kind: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint folder that transformers and Fovea can load. kind: its model_type."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    randomise(TEXT_MODELS[kind]().eval()).to(dtype).save_pretrained(folder)
    tokenizer(QWEN_TEMPLATE).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    return folder
