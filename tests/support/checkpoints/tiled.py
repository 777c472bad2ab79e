"""Tiny models that look at an image in tiles."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.checkpoints.parts import CLIP_NORM, HALF_NORM, decoder, hybrid_decoder, llama, siglip_tower


def idefics3(ids: dict[str, int]) -> Any:
    config = hf.Idefics3Config(vision_config=siglip_tower(), text_config=llama(), scale_factor=2, **ids)
    return hf.Idefics3ForConditionalGeneration(config)


def smolvlm(ids: dict[str, int]) -> Any:
    config = hf.SmolVLMConfig(vision_config=siglip_tower(), text_config=llama(), scale_factor=2, **ids)
    return hf.SmolVLMForConditionalGeneration(config)


def lfm2_vl(ids: dict[str, int]) -> Any:
    vision = hf.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_patches=16,
        patch_size=8, vision_use_head=False,
    )  # fmt: skip
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = hf.Lfm2Config(
        **{**decoder(), **heads}, conv_L_cache=3, block_multiple_of=16,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    config = hf.Lfm2VlConfig(
        vision_config=vision, text_config=text, downsample_factor=2, projector_hidden_size=48, **ids
    )
    return hf.Lfm2VlForConditionalGeneration(config)


def internvl(ids: dict[str, int]) -> Any:
    vision = hf.InternVLVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56,
        patch_size=14, attention_bias=True,
    )  # fmt: skip
    text = hf.Qwen2Config(**decoder(rope_scaling={"type": "dynamic", "factor": 2.0}))
    config = hf.InternVLConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    return hf.InternVLForConditionalGeneration(config)


def minicpmv4_6(ids: dict[str, int]) -> Any:
    vision = {**siglip_tower(), "image_size": 70, "patch_size": 14, "num_hidden_layers": 4}
    config = hf.MiniCPMV4_6Config(
        vision_config=vision,
        text_config=hf.Qwen3_5TextConfig(**hybrid_decoder(), tie_word_embeddings=True),
        insert_layer_id=1,
        image_size=112,
        tie_word_embeddings=True,
        **ids,
    )
    return hf.MiniCPMV4_6ForConditionalGeneration(config)


def mllama(ids: dict[str, int]) -> Any:
    image = ids["image_token_id"]
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_global_layers": 2,
        "attention_heads": 4, "image_size": 56, "patch_size": 14, "max_num_tiles": 4,
        "intermediate_layers_indices": [0, 1], "vision_output_dim": 96,
    }  # fmt: skip
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    # The image token's id is the size of the vocabulary: the table has a row for it, the head has none.
    text = decoder(
        vocab_size=image, bos_token_id=1, num_attention_heads=2, num_key_value_heads=1,
        cross_attention_layers=[1], rope_parameters=rope,
        tie_word_embeddings=False,
    )  # fmt: skip
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=image)
    return hf.MllamaForConditionalGeneration(config)


IDEFICS_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 256},
    "max_image_size": {"longest_edge": 64}, "do_image_splitting": True, **HALF_NORM,
}  # fmt: skip
SMOL_PROCESSOR = {**IDEFICS_PROCESSOR, "image_processor_type": "SmolVLMImageProcessor"}
LFM2_PROCESSOR = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8, "downsample_factor": 2,
    "min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 64, "min_tiles": 2, "max_tiles": 4,
    "resample": 2, **HALF_NORM,
}  # fmt: skip
INTERNVL_PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 56, "width": 56}, "resample": 3,
    "crop_to_patches": False, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip
MINICPM_PROCESSOR = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": 6, "scale_resolution": 84,
    "patch_size": 14, "use_image_id": True, "slice_mode": True, **HALF_NORM,
}  # fmt: skip
MLLAMA_PROCESSOR = {
    "image_processor_type": "MllamaImageProcessor", "size": {"height": 56, "width": 56}, "max_image_tiles": 4,
    "resample": 2, "do_pad": True, **CLIP_NORM,
}  # fmt: skip
