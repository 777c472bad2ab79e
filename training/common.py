"""Paths, special tokens and the model's configuration, for all scripts of this folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
ASSETS = HERE.parent / "src" / "fovea" / "assets" / "fovea-tiny"
RUNS = HERE / "runs"

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    """The content of config.json: a small Qwen3-VL."""
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    end = tokenizer.token_to_id("<|im_end|>")
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "dtype": "bfloat16",
            "vocab_size": size,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": end,
            "use_cache": True,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 5,
            "hidden_size": 192,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 768,
            "num_heads": 3,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 256,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1, 3],
            "initializer_range": 0.02,
        },
    }
