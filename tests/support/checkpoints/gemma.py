"""Tiny models of the Gemma family."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.support.checkpoints.parts import HALF_NORM, decoder
from tests.support.checkpoints.tokens import VOCABULARY


def gemma3(ids: dict[str, int]) -> Any:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 7,
        "vision_use_head": False,
    }  # fmt: skip
    text = decoder(
        head_dim=32, query_pre_attn_scalar=24, sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    )  # fmt: skip
    image = ids.pop("image_token_id")
    config = hf.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=16, image_token_index=image,
        boi_token_index=image - 2, eoi_token_index=image - 1, **ids,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config)
    # The table of embeddings is the head as well. If the layers added little to an embedding, the model would
    # repeat its last token, whatever the prompt is.
    for layer in model.model.language_model.layers:
        layer.post_attention_layernorm.weight.data.fill_(4)
        layer.post_feedforward_layernorm.weight.data.fill_(4)
    return model


def gemma4(ids: dict[str, int], **changes: Any) -> Any:
    """A model with an audio tower, whose tensors Fovea does not load. changes: of the text configuration.

    The tokens of videos and audio have no ids: transformers would replace their embeddings in answers, too.
    """
    vision = {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 12, "patch_size": 4, "position_embedding_size": 210,
        "use_clipped_linears": True, "standardize": True,
    }  # fmt: skip
    audio = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24,
        "subsampling_conv_channels": [8, 4],
    }  # fmt: skip
    shape = decoder(
        num_hidden_layers=5, head_dim=32, global_head_dim=64, sliding_window=24, num_kv_shared_layers=2,
        layer_types=["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=VOCABULARY, use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
    )  # fmt: skip
    text = shape | changes
    image = ids["image_token_id"]
    config = hf.Gemma4Config(
        vision_config=vision, text_config=text, audio_config=audio, boi_token_id=image - 2,
        eoi_token_id=image - 1, audio_token_id=None, boa_token_id=None, eoa_token_index=None,
        video_token_id=None, **ids,
    )  # fmt: skip
    model = hf.Gemma4ForConditionalGeneration(config)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_((1.0 if name.endswith("max") else -1.0) * (2 + torch.rand(()).item()))
        elif ".std_" in name:
            buffer.normal_()
    return model


GEMMA3_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, **HALF_NORM,
}  # fmt: skip
GEMMA4_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4,
    "pooling_kernel_size": 3, "do_normalize": False,
}  # fmt: skip
