"""Reads config.json of InternVL checkpoints in their original layout (model_type `internvl_chat`).

transformers has no class for it, and the code that comes with these checkpoints is never run. Their settings
are translated to transformers' `InternVLConfig`, which describes the same model. Names of tensors are
translated in `names`; settings of the tiling stay as they are, for the image processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.models.tokenizer import added_ids
from fovea.engine.models.towers import QK_NORM_EPS
from fovea.engine.vision.processor.internvl import MARKER
from fovea.engine.vision.processor.settings import section

MODEL_TYPE = "internvl_chat"
VISION_MODEL = "intern_vit_6b"
"""model_type of the vision tower, whatever its size."""
END_OF_TURN = "<|im_end|>"
TEXT_MODELS: Mapping[str, str] = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "InternLM2ForCausalLM": "llama",
}
"""model_type in transformers of each language model's class. InternLM2 is Llama with other tensor names."""
VISION_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 3200,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "hidden_act": "gelu",
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 224,
    "patch_size": 14,
    "num_channels": 3,
}
"""Defaults of the original class of the vision tower, whose names are those of transformers."""
TILING = ("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch")
"""Settings that the image processor reads (`vision.processor.internvl_chat`)."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "ps_version": ("v2",),
    "pad2square": (False, None),
    "image_fold": (None,),
    "use_backbone_lora": (0, None),
    "use_llm_lora": (0, None),
}
"""Accepted values of settings that change the model, but have no counterpart in transformers' class."""
_DEFAULTS = {"ps_version": "v1"}
_NOT_PASSED_ON = ("architectures", "model_type", "auto_map", "attn_implementation", "bias")


def to_config(content: Mapping[str, Any], folder: Path) -> Any:
    """Return the configuration of transformers for a config.json.

    folder: the checkpoint, whose tokenizer tells the ids of tokens.

    Raises CheckpointError or UnsupportedModel.
    """
    from transformers import InternVLConfig

    for name, accepted in _ONLY.items():
        value = content.get(name, _DEFAULTS.get(name))
        if value not in accepted:
            raise UnsupportedModel(f"{name} is {value!r}; accepted: {accepted[0]!r}")
    tokens = added_ids(folder)
    if MARKER not in tokens:
        raise CheckpointError(f"{folder}: the tokenizer has no token {MARKER}, which stands for images")
    kept = {name: content[name] for name in (*TILING, "quantization_config") if name in content}
    config = InternVLConfig(
        vision_config=_vision(section(content, "vision_config"), content.get("force_image_size")),
        text_config=_text(section(content, "llm_config")),
        image_token_id=tokens[MARKER],
        downsample_ratio=content.get("downsample_ratio", 0.5),
        vision_feature_layer=content.get("select_layer", -1),
        tie_word_embeddings=section(content, "llm_config").get("tie_word_embeddings", False),
        # The original code ends answers with the turn, whatever the language model's own settings say.
        eos_token_id=tokens.get(END_OF_TURN),
        **kept,
    )
    config.model_type = MODEL_TYPE
    return config


def _vision(original: Mapping[str, Any], forced_size: int | None) -> dict[str, Any]:
    """Settings of the vision tower for transformers. forced_size: the setting force_image_size."""
    kind = original.get("model_type")
    if kind != VISION_MODEL:
        raise UnsupportedModel(f"vision_config.model_type is {kind!r}; accepted: {VISION_MODEL!r}")
    vision = {name: original.get(name, default) for name, default in VISION_DEFAULTS.items()}
    if forced_size not in (None, vision["image_size"]):
        raise UnsupportedModel(
            f"force_image_size is {forced_size}; accepted: {vision['image_size']}, the tower's own size"
        )
    vision["attention_bias"] = original.get("qkv_bias", False)
    vision["use_qk_norm"] = original.get("qk_normalization", True)
    if vision["use_qk_norm"] and vision["layer_norm_eps"] != QK_NORM_EPS:
        raise UnsupportedModel(
            f"layer_norm_eps is {vision['layer_norm_eps']} with norms of queries and keys; "
            f"accepted: {QK_NORM_EPS}"
        )
    return vision


def _text(original: Mapping[str, Any]) -> Any:
    """The configuration of the language model for transformers."""
    from transformers import AutoConfig

    names = original.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name not in TEXT_MODELS:
        raise UnsupportedModel(f"llm_config.architectures is {names!r}; supported: {', '.join(TEXT_MODELS)}")
    settings = {name: value for name, value in original.items() if name not in _NOT_PASSED_ON}
    if name == "InternLM2ForCausalLM":
        settings["attention_bias"] = original.get("bias", True)
    return AutoConfig.for_model(TEXT_MODELS[name], **settings)
