"""Tiny random checkpoints of every supported architecture, in the format that transformers writes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.internvl import to_original

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
MORE_SPECIALS = {
    **dict.fromkeys(("internvl", "internvl_chat"), ["<img>", "</img>", "<IMG_CONTEXT>"]),
    "lfm2_vl": [
        "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ],
    **dict.fromkeys(
        ("pixtral", "mistral3"), ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    ),
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "gemma4": ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>"],
    "minicpmv4_6": ["</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
    "mllama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    **dict.fromkeys(
        ("glm4v", "glm46v"),
        [
            "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>",
            "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>",
        ],
    ),
    "paddleocr_vl": ["<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"],
}  # fmt: skip
"""Further special tokens of some architectures. In all of them they would change the ids of the others."""
LAST_SPECIALS = {"mllama": ["<|image|>"]}
"""Special tokens that come after all others. Their ids are beyond the rows of the language head."""
CORPUS = [
    "What is in the image? Describe the picture, please.",
    "the red circle is left of the blue square",
] * 4
VOCABULARY = 384
TEXT_LAYERS = 3
"""Number of layers of a decoder. Tests of slow kernels lower it."""

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% endif %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}[IMG]{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'user' %}[/INST]{% else %}<|im_end|>{% endif %}{% endfor %}"
)
# Like the published template: the images of a turn come before its text.
PADDLEOCR_TEMPLATE = (
    "<|begin_of_sentence|>{% for m in messages %}{% if m['role'] == 'user' %}User: "
    "{% for c in m['content'] if c['type'] == 'image' %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"
    "{% endfor %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ '\\n' }}{% elif m['role'] == 'assistant' %}Assistant: "
    "{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}{{ eos_token }}"
    "{% else %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] + '\\n' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<IMG_CONTEXT>\n{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
GLM_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif c['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA4_TEMPLATE = (
    "{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
MINICPM_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{% if c['type'] == 'image' %}<|image_pad|>{% elif c['type'] == 'video' %}<|video_pad|>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like the published template without its system message, which is only for prompts without images.
MLLAMA_TEMPLATE = (
    "<|begin_of_text|>{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<|image|>{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {
    "<image_soft_token>": GEMMA_TEMPLATE,
    "<|image_pad|>": QWEN_TEMPLATE,
    "<image>": IMAGE_TEMPLATE,
    "[IMG]": MISTRAL_TEMPLATE,
    "<|IMAGE_PLACEHOLDER|>": PADDLEOCR_TEMPLATE,
    "<|image|>": GLM_TEMPLATE,
    "<IMG_CONTEXT>": INTERNVL_TEMPLATE,
}
"""Chat templates by the marker of an image."""
OWN_TEMPLATES = {"minicpmv4_6": MINICPM_TEMPLATE, "gemma4": GEMMA4_TEMPLATE, "mllama": MLLAMA_TEMPLATE}
"""Chat templates of architectures whose marker another architecture has, too."""
VIDEO_MARKERS = {
    "llava_onevision": "<video>",
    "minicpmv4_6": "<|video_pad|>",
    **dict.fromkeys(("glm4v", "glm46v"), "<|video|>"),
}
"""Video tokens of architectures that take no videos in Fovea. Their configurations name the tokens."""
PROCESSOR_CONFIGS: dict[str, dict[str, Any]] = {
    "internvl": {"image_seq_length": 4},
    "deepseek_ocr2": {"patch_size": 2, "downsample_ratio": 4},
}
"""Settings in processor_config.json of some architectures."""
CLIP_NORM = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def tokenizer(template: str, more: Sequence[str] = (), last: Sequence[str] = ()) -> Any:
    """A tokenizer whose first ids are special tokens, `more` among them, and whose last ids are `last`."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIALS, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens(list(last))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


def _text(**extra: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64, "intermediate_size": 112,
        "num_hidden_layers": TEXT_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, **extra,
    }  # fmt: skip


def _qwen_vision(**extra: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "num_heads": 4,
        "in_channels": 3,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **extra,
    }


def _qwen2_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen2VLConfig(
        vision_config=_qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2, patch_size=14),
        text_config=_text(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
        **ids,
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen2_5_VLConfig(
        vision_config=_qwen_vision(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=14, window_size=112,
            fullatt_block_indexes=[1],
        ),
        text_config=_text(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
        **ids,
    )  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(ids: dict[str, int]) -> Any:
    config = hf.Qwen3VLConfig(
        vision_config=_qwen_vision(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=16,
            num_position_embeddings=64, deepstack_visual_indexes=[0, 2],
        ),
        text_config=_text(head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}),
        **ids,
    )  # fmt: skip
    return hf.Qwen3VLForConditionalGeneration(config)


def _qwen3_vision() -> dict[str, Any]:
    return _qwen_vision(
        hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=16, num_position_embeddings=64
    )


EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip


def _qwen3_vl_moe(ids: dict[str, int]) -> Any:
    config = hf.Qwen3VLMoeConfig(
        vision_config={**_qwen3_vision(), "deepstack_visual_indexes": [0, 2]},
        text_config=_text(
            head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}, **EXPERTS
        ),
        **ids,
    )
    return hf.Qwen3VLMoeForConditionalGeneration(config)


def _hybrid_text(**extra: Any) -> dict[str, Any]:
    """Text configuration of Qwen3.5: two layers of Gated DeltaNet, then one of attention."""
    return _text(
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        },
        **extra,
    )  # fmt: skip


def _qwen3_5(ids: dict[str, int]) -> Any:
    config = hf.Qwen3_5Config(vision_config=_qwen3_vision(), text_config=_hybrid_text(), **ids)
    return hf.Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe(ids: dict[str, int]) -> Any:
    text = _hybrid_text(**EXPERTS, shared_expert_intermediate_size=32)
    config = hf.Qwen3_5MoeConfig(vision_config=_qwen3_vision(), text_config=text, **ids)
    return hf.Qwen3_5MoeForConditionalGeneration(config)


def _clip() -> Any:
    return hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )


def _llama() -> Any:
    return hf.LlamaConfig(**_text())


def _llava(ids: dict[str, int]) -> Any:
    config = hf.LlavaConfig(vision_config=_clip(), text_config=_llama(), **ids)
    return hf.LlavaForConditionalGeneration(config)


PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]


def _llava_next(ids: dict[str, int]) -> Any:
    config = hf.LlavaNextConfig(
        vision_config=_clip(), text_config=_llama(), image_grid_pinpoints=PINPOINTS, **ids
    )
    return hf.LlavaNextForConditionalGeneration(config)


ONEVISION_PINPOINTS = [[56 * row, 56 * column] for row in range(1, 5) for column in range(1, 5)]


def _llava_onevision(ids: dict[str, int]) -> Any:
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = hf.LlavaOnevisionConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**_text()), image_grid_pinpoints=ONEVISION_PINPOINTS,
        vision_aspect_ratio="anyres_max_4", **ids,
    )  # fmt: skip
    return hf.LlavaOnevisionForConditionalGeneration(config)


def _siglip_dict() -> dict[str, Any]:
    return {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 8,
    }  # fmt: skip


def _idefics3(ids: dict[str, int]) -> Any:
    config = hf.Idefics3Config(vision_config=_siglip_dict(), text_config=_llama(), scale_factor=2, **ids)
    return hf.Idefics3ForConditionalGeneration(config)


def _smolvlm(ids: dict[str, int]) -> Any:
    config = hf.SmolVLMConfig(vision_config=_siglip_dict(), text_config=_llama(), scale_factor=2, **ids)
    return hf.SmolVLMForConditionalGeneration(config)


def _lfm2_vl(ids: dict[str, int]) -> Any:
    vision = hf.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_patches=16,
        patch_size=8, vision_use_head=False,
    )  # fmt: skip
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = hf.Lfm2Config(
        **{**_text(), **heads}, conv_L_cache=3, block_multiple_of=16,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    config = hf.Lfm2VlConfig(
        vision_config=vision, text_config=text, downsample_factor=2, projector_hidden_size=48, **ids
    )
    return hf.Lfm2VlForConditionalGeneration(config)


def _deepseek_ocr2(ids: dict[str, int]) -> Any:
    # The numbers of queries are those of the class, so a view has 64 x 64 patches; they are small instead.
    sam = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": 128, "patch_size": 2, "window_size": 14, "global_attn_indexes": [1], "mlp_ratio": 2.0,
        "downsample_channels": [24, 32],
    }  # fmt: skip
    encoder = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    text = _text(
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2, n_group=1,
        topk_group=1, routed_scaling_factor=1.5, mlp_layer_types=["dense", *["sparse"] * (TEXT_LAYERS - 1)],
    )  # fmt: skip
    config = hf.DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder}, text_config=text, **ids
    )
    return hf.DeepseekOcr2ForConditionalGeneration(config)


def _pixtral_tower() -> dict[str, Any]:
    return {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "head_dim": 8, "image_size": 196, "patch_size": 14, "hidden_act": "silu",
    }  # fmt: skip


def _mistral() -> Any:
    return hf.MistralConfig(**_text(head_dim=16, sliding_window=None))


def _pixtral(ids: dict[str, int]) -> Any:
    config = hf.LlavaConfig(
        vision_config=_pixtral_tower(), text_config=_mistral(), vision_feature_layer=-1,
        vision_feature_select_strategy="full", **ids,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def _mistral3(ids: dict[str, int]) -> Any:
    config = hf.Mistral3Config(
        vision_config=_pixtral_tower(), text_config=_mistral(), spatial_merge_size=2,
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config)


def _lighton_ocr(ids: dict[str, int]) -> Any:
    config = hf.LightOnOcrConfig(
        vision_config=_pixtral_tower(), text_config=hf.Qwen3Config(**_text(head_dim=16)),
        spatial_merge_size=2, **ids,
    )  # fmt: skip
    return hf.LightOnOcrForConditionalGeneration(config)


def _paddleocr_vl(ids: dict[str, int]) -> Any:
    config = hf.PaddleOCRVLConfig(
        vision_config={**_siglip_dict(), "image_size": 98, "patch_size": 14, "num_channels": 3},
        text_config=_text(
            head_dim=16,
            use_bias=True,
            tie_word_embeddings=False,
            rope_scaling={"type": "default", "mrope_section": [2, 3, 3]},
        ),
        tie_word_embeddings=False,
        **ids,
    )
    return hf.PaddleOCRVLForConditionalGeneration(config)


def _internvl(ids: dict[str, int]) -> Any:
    vision = hf.InternVLVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=56,
        patch_size=14, attention_bias=True,
    )  # fmt: skip
    text = hf.Qwen2Config(**_text(rope_scaling={"type": "dynamic", "factor": 2.0}))
    config = hf.InternVLConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    return hf.InternVLForConditionalGeneration(config)


def _gemma3(ids: dict[str, int]) -> Any:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56, "patch_size": 7,
        "vision_use_head": False,
    }  # fmt: skip
    text = _text(
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


def _gemma4(ids: dict[str, int], **changes: Any) -> Any:
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
    shape = _text(
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


def _minicpmv4_6(ids: dict[str, int]) -> Any:
    vision = {**_siglip_dict(), "image_size": 70, "patch_size": 14, "num_hidden_layers": 4}
    config = hf.MiniCPMV4_6Config(
        vision_config=vision,
        text_config=hf.Qwen3_5TextConfig(**_hybrid_text(), tie_word_embeddings=True),
        insert_layer_id=1,
        image_size=112,
        tie_word_embeddings=True,
        **ids,
    )
    return hf.MiniCPMV4_6ForConditionalGeneration(config)


def _mllama(ids: dict[str, int]) -> Any:
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
    text = _text(
        vocab_size=image, bos_token_id=1, num_attention_heads=2, num_key_value_heads=1,
        cross_attention_layers=[1], rope_parameters=rope,
        tie_word_embeddings=False,
    )  # fmt: skip
    config = hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=image)
    return hf.MllamaForConditionalGeneration(config)


def _glm_parts() -> dict[str, Any]:
    """Configurations of both parts. Half of each head is rotated."""
    return {
        "vision_config": _qwen_vision(
            hidden_size=32, intermediate_size=48, out_hidden_size=64, patch_size=14, image_size=56
        ),
        "text_config": _text(
            rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [1, 2, 1],
            },
        ),
    }  # fmt: skip


def _glm4v(ids: dict[str, int]) -> Any:
    return hf.Glm4vForConditionalGeneration(hf.Glm4vConfig(**_glm_parts(), **ids))


def _glm46v(ids: dict[str, int]) -> Any:
    return hf.Glm46VForConditionalGeneration(hf.Glm46VConfig(**_glm_parts(), **ids))


def _qwen_processor(patch: int) -> dict[str, Any]:
    unit = patch * 2
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": 4 * unit**2, "max_pixels": 64 * unit**2, **CLIP_NORM,
    }  # fmt: skip


_CLIP_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56}, **CLIP_NORM,
}  # fmt: skip
_NEXT_PROCESSOR = {
    **_CLIP_PROCESSOR, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS,
}  # fmt: skip
_ONEVISION_PROCESSOR = {
    "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 56, "width": 56},
    "image_grid_pinpoints": ONEVISION_PINPOINTS, **CLIP_NORM,
}  # fmt: skip
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IDEFICS_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 256},
    "max_image_size": {"longest_edge": 64}, "do_image_splitting": True, **_HALF,
}  # fmt: skip
_PADDLEOCR_PROCESSOR = {
    **_qwen_processor(14), "image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1,
    **_HALF,
}  # fmt: skip
_GLM_PROCESSOR = {
    "image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "size": {"shortest_edge": 2 * 4 * 28**2, "longest_edge": 2 * 64 * 28**2},
    **CLIP_NORM,
}  # fmt: skip
_GLM46_PROCESSOR = {**_GLM_PROCESSOR, "image_processor_type": "Glm46VImageProcessor"}
_SMOL_PROCESSOR = {**_IDEFICS_PROCESSOR, "image_processor_type": "SmolVLMImageProcessor"}
_PIXTRAL_PROCESSOR = {
    "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14},
    "size": {"longest_edge": 196}, **CLIP_NORM,
}  # fmt: skip

_INTERNVL_PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 56, "width": 56}, "resample": 3,
    "crop_to_patches": False, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


_MINICPM_PROCESSOR = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor", "max_slice_nums": 6, "scale_resolution": 84,
    "patch_size": 14, "use_image_id": True, "slice_mode": True, **_HALF,
}  # fmt: skip


def _video_processor(architecture: str) -> dict[str, Any]:
    """The video processor's settings: as in real checkpoints of the architecture, but with small limits."""
    newest = architecture.startswith("qwen3")
    unit = 32 if newest else 28
    norm = _HALF if newest else CLIP_NORM
    return {
        "video_processor_type": "Qwen3VLVideoProcessor" if newest else "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 4 * unit**2, "longest_edge": (256 if newest else 24) * unit**2},
        "patch_size": unit // 2, "merge_size": 2, "temporal_patch_size": 2, "fps": 2, "min_frames": 4,
        "max_frames": 32, **norm,
    }  # fmt: skip


_GEMMA3_PROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, **_HALF,
}  # fmt: skip
_DEEPSEEK_PROCESSOR = {
    "image_processor_type": "DeepseekOcr2ImageProcessor", "size": {"height": 128, "width": 128},
    "tile_size": 96, "max_patches": 3, **_HALF,
}  # fmt: skip
_GEMMA4_PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70, "patch_size": 4,
    "pooling_kernel_size": 3, "do_normalize": False,
}  # fmt: skip
_MLLAMA_PROCESSOR = {
    "image_processor_type": "MllamaImageProcessor", "size": {"height": 56, "width": 56}, "max_image_tiles": 4,
    "resample": 2, "do_pad": True, **CLIP_NORM,
}  # fmt: skip
_LFM2_PROCESSOR = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8, "downsample_factor": 2,
    "min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 64, "min_tiles": 2, "max_tiles": 4,
    "resample": 2, **_HALF,
}  # fmt: skip


Builder = Callable[[dict[str, int]], Any]
ARCHITECTURES: dict[str, tuple[Builder, dict[str, Any], str]] = {
    "qwen3_vl": (_qwen3_vl, _qwen_processor(16), "<|image_pad|>"),
    "qwen3_5": (_qwen3_5, _qwen_processor(16), "<|image_pad|>"),
    "qwen3_5_moe": (_qwen3_5_moe, _qwen_processor(16), "<|image_pad|>"),
    "qwen3_vl_moe": (_qwen3_vl_moe, _qwen_processor(16), "<|image_pad|>"),
    "qwen2_5_vl": (_qwen2_5_vl, _qwen_processor(14), "<|image_pad|>"),
    "qwen2_vl": (_qwen2_vl, _qwen_processor(14), "<|image_pad|>"),
    "llava": (_llava, _CLIP_PROCESSOR, "<image>"),
    "llava_next": (_llava_next, _NEXT_PROCESSOR, "<image>"),
    "llava_onevision": (_llava_onevision, _ONEVISION_PROCESSOR, "<image>"),
    "idefics3": (_idefics3, _IDEFICS_PROCESSOR, "<image>"),
    "smolvlm": (_smolvlm, _SMOL_PROCESSOR, "<image>"),
    "gemma3": (_gemma3, _GEMMA3_PROCESSOR, "<image_soft_token>"),
    "gemma4": (_gemma4, _GEMMA4_PROCESSOR, "<|image|>"),
    "lfm2_vl": (_lfm2_vl, _LFM2_PROCESSOR, "<image>"),
    "pixtral": (_pixtral, _PIXTRAL_PROCESSOR, "[IMG]"),
    "mistral3": (_mistral3, _PIXTRAL_PROCESSOR, "[IMG]"),
    "lighton_ocr": (_lighton_ocr, _PIXTRAL_PROCESSOR, "<|image_pad|>"),
    "paddleocr_vl": (_paddleocr_vl, _PADDLEOCR_PROCESSOR, "<|IMAGE_PLACEHOLDER|>"),
    "glm4v": (_glm4v, _GLM_PROCESSOR, "<|image|>"),
    "glm46v": (_glm46v, _GLM46_PROCESSOR, "<|image|>"),
    "internvl": (_internvl, _INTERNVL_PROCESSOR, "<IMG_CONTEXT>"),
    "internvl_chat": (_internvl, _INTERNVL_PROCESSOR, "<IMG_CONTEXT>"),
    "minicpmv4_6": (_minicpmv4_6, _MINICPM_PROCESSOR, "<|image_pad|>"),
    "deepseek_ocr2": (_deepseek_ocr2, _DEEPSEEK_PROCESSOR, "<image>"),
    "mllama": (_mllama, _MLLAMA_PROCESSOR, "<|image|>"),
}


def write(architecture: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint folder that transformers and Fovea can load.

    The weights vary enough that logits differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(architecture, seed, dtype, TEXT_LAYERS).items():
        (folder / name).write_bytes(content)
    return folder


def write_gemma4(folder: Path, **changes: Any) -> Path:
    """Write a tiny Gemma 4. changes: of its text configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    _, processor, marker = ARCHITECTURES["gemma4"]
    return _write("gemma4", folder, 0, torch.float32, (partial(_gemma4, **changes), processor, marker))


@cache
def _files(architecture: str, seed: int, dtype: torch.dtype, layers: int) -> dict[str, bytes]:
    """Return the files of a checkpoint by their names. They are made once per process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = _write(architecture, Path(scratch), seed, dtype)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _write(
    architecture: str,
    folder: Path,
    seed: int,
    dtype: torch.dtype,
    parts: tuple[Builder, dict[str, Any], str] | None = None,
) -> Path:
    builder, processor, marker = parts or ARCHITECTURES[architecture]
    template = OWN_TEMPLATES.get(architecture, TEMPLATES[marker])
    words = tokenizer(template, MORE_SPECIALS.get(architecture, ()), LAST_SPECIALS.get(architecture, ()))
    ids = {"image_token_id": words.convert_tokens_to_ids(marker)}
    if architecture.startswith("qwen"):
        ids |= {
            "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
            "vision_start_token_id": words.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>"),
        }
    if architecture == "paddleocr_vl":
        ids |= {
            "vision_start_token_id": words.convert_tokens_to_ids("<|IMAGE_START|>"),
            "vision_end_token_id": words.convert_tokens_to_ids("<|IMAGE_END|>"),
        }
    if architecture in VIDEO_MARKERS:
        ids["video_token_id"] = words.convert_tokens_to_ids(VIDEO_MARKERS[architecture])
    torch.manual_seed(seed)
    model = randomise(builder(ids).eval())
    if architecture == "gemma4":
        # transformers takes image tokens that a model chooses for images. With a row of zeros none is chosen.
        model.get_input_embeddings().weight.data[ids["image_token_id"]] = 0
    model.to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if architecture.startswith("qwen"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(_video_processor(architecture)))
    side = {"processor_class": "any"}
    if architecture in ("llava", "llava_next"):
        side |= {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
    if architecture == "llava_onevision":
        side |= {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    if architecture in ("idefics3", "smolvlm"):
        side |= {"image_seq_len": 16}
    if architecture in ("pixtral", "mistral3", "lighton_ocr"):
        side |= {"patch_size": 14, "spatial_merge_size": 1 if architecture == "pixtral" else 2}
    side |= PROCESSOR_CONFIGS.get(architecture, {})
    (folder / "processor_config.json").write_text(json.dumps(side))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 2}))
    return to_original(folder) if architecture == "internvl_chat" else folder


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Give a model random weights that differ enough for logits to differ. Returns the model."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4, -1)  # slow decay: answers depend on all tokens of a prompt
        elif parameter.ndim > 1:
            parameter.normal_(0, 0.12)
        elif parameter.numel() == 1:
            parameter.uniform_(0.5, 1)  # gates are open
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
