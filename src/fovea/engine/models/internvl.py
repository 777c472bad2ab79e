"""InternVL (arXiv 2404.16821, 2412.05271, 2504.10479): tiles through InternViT, pixel shuffle, Qwen or Llama.

The same classes load both layouts of checkpoints: that of transformers, and the original one
(model_type `internvl_chat`), in which queries, keys and values are one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.models.base import MLPProjector, VisionLanguageModel
from fovea.engine.models.idefics3 import pixel_shuffle
from fovea.engine.models.targets import FusedTensor
from fovea.engine.models.text import Renames
from fovea.engine.models.tokenizer import added_ids
from fovea.engine.models.towers import QK_NORM_EPS, internvl_tower
from fovea.engine.vision.calls import ProjectorLayer, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualFeatures, VisualShape
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.processor.internvl import MARKER, merge_factor
from fovea.engine.vision.processor.settings import section
from fovea.engine.vision.vit import VisionTransformer
from fovea.planner.shape import Tower

CHAT_MODEL_TYPE = "internvl_chat"
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


def chat_config(content: Mapping[str, Any], folder: Path) -> Any:
    """Return the configuration of transformers for a config.json.

    transformers has no class for it, and the code that comes with these checkpoints is never run. Their
    settings are translated to transformers' `InternVLConfig`, which describes the same model. Names of
    tensors are translated in `targets`; settings of the tiling stay as they are, for the image processor.

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
        vision_config=_chat_vision(section(content, "vision_config"), content.get("force_image_size")),
        text_config=_chat_text(section(content, "llm_config")),
        image_token_id=tokens[MARKER],
        downsample_ratio=content.get("downsample_ratio", 0.5),
        vision_feature_layer=content.get("select_layer", -1),
        tie_word_embeddings=section(content, "llm_config").get("tie_word_embeddings", False),
        # The original code ends answers with the turn, whatever the language model's own settings say.
        eos_token_id=tokens.get(END_OF_TURN),
        **kept,
    )
    config.model_type = CHAT_MODEL_TYPE
    return config


def _chat_vision(original: Mapping[str, Any], forced_size: int | None) -> dict[str, Any]:
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


def _chat_text(original: Mapping[str, Any]) -> Any:
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


PROJECTOR_EPS = 1e-5
_LAYER = r"^(vision\.encoder\.layers\.\d+"
_TOWER_RENAMES: Renames = (
    (r"^vision\.embeddings\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^vision\.embeddings\.patch_embeddings\.projection\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.embeddings\.position_embeddings?$", "vision.embeddings.position_embedding.weight"),
    (r"^vision\.layernorm\.", "vision.post_layernorm."),
    (r"^vision\.encoder\.layer\.", "vision.encoder.layers."),
    (_LAYER + r")\.(attention|attn)\.", r"\1.self_attn."),
    (_LAYER + r"\.self_attn)\.(projection_layer|proj)\.", r"\1.out_proj."),
    (_LAYER + r")\.(layernorm_before|norm1)\.", r"\1.layer_norm1."),
    (_LAYER + r")\.(layernorm_after|norm2)\.", r"\1.layer_norm2."),
    (_LAYER + r")\.(lambda_|ls)([12])$", r"\1.layer_scale\3"),
)
"""Names inside the tower, in both layouts."""
_INTERNLM2 = r"^(decoder\.layers\.\d+)\."
_DECODER_RENAMES: Renames = (
    (r"^decoder\.tok_embeddings\.", "decoder.embed_tokens."),
    (_INTERNLM2 + r"attention\.wqkv\.", r"\1.self_attn.wqkv."),
    (_INTERNLM2 + r"attention\.wo\.", r"\1.self_attn.o_proj."),
    (_INTERNLM2 + r"feed_forward\.w1\.", r"\1.mlp.gate_proj."),
    (_INTERNLM2 + r"feed_forward\.w2\.", r"\1.mlp.down_proj."),
    (_INTERNLM2 + r"feed_forward\.w3\.", r"\1.mlp.up_proj."),
    (_INTERNLM2 + r"attention_norm\.", r"\1.input_layernorm."),
    (_INTERNLM2 + r"ffn_norm\.", r"\1.post_attention_layernorm."),
)
"""Names inside the decoder of InternLM2."""


class InternVL(VisionLanguageModel):
    """InternVL 2, 2.5, 3 and 3.5 with a dense decoder."""

    ignored = (
        r"^vision\.embeddings\.mask_token$",
        r"^vision\.post_layernorm\.",
        r"^vision\.encoder\.layers\.",
    )
    renames = (*_TOWER_RENAMES, *_DECODER_RENAMES)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        strategy = config.vision_feature_select_strategy
        if strategy != "default":
            raise UnsupportedModel(f"vision_feature_select_strategy {strategy!r}: accepted is default")
        vision = config.vision_config
        tap = _tap(config.vision_feature_layer, vision.num_hidden_layers)
        # The last norm is a part of the last layer's output only if that layer is read as -1.
        post_norm = config.vision_feature_layer == -1 and not vision.use_mean_pooling
        tower = internvl_tower(vision, (tap,), post_norm=post_norm)
        self.vision = VisionTransformer(tower)
        self.factor = merge_factor(config.downsample_ratio, tower.side)
        width = config.text_config.hidden_size
        self.projector = MLPProjector(
            tower.hidden * self.factor**2,
            width,
            width,
            bias=True,
            activation=config.projector_hidden_act,
            eps=PROJECTOR_EPS,
        )

    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        x = yield from self.vision.slices(self.array_tensor(image))
        tokens = pixel_shuffle(x[:, 1:], self.factor).flatten(0, 1)
        return VisualFeatures((yield from apply_by_rows(ProjectorLayer(self.projector), tokens)))

    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        views, rows, columns = plan.grid
        tiles = views + rows * columns
        return self.vision.shape(tiles, dropped_rows=1, rows_per_token=self.factor**2)

    def tower_shape(self) -> Tower:
        tokens = (self.vision.config.side // self.factor) ** 2
        return self.vision.tower_shape(tokens, dropped_rows=1, rows_per_token=self.factor**2)

    def fused_tensors(self) -> Mapping[str, FusedTensor]:
        """Queries, keys and values of the tower (all models) and of the decoder (InternLM2)."""
        return {fused.name: fused for fused in self._fused()}

    def _fused(self) -> Iterator[FusedTensor]:
        width, decoder = self.vision.config.hidden, self.whole
        heads = decoder.attention_heads
        shared = heads.query // heads.kv * heads.dim
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj")]
            for layer in range(self.vision.config.depth):
                path = f"vision.encoder.layers.{layer}.self_attn."
                parts = tuple((path + name, width) for name in names)
                yield FusedTensor(f"{path}qkv.{kind}", 1, parts)
            for layer in range(len(decoder.layers)):
                path = f"decoder.layers.{layer}.self_attn."
                sizes = (shared, heads.dim, heads.dim)
                parts = tuple((path + name, size) for name, size in zip(names, sizes, strict=True))
                yield FusedTensor(f"{path}wqkv.{kind}", heads.kv, parts)


def _tap(layer: Any, depth: int) -> int:
    """Number of the layer whose output is read; -1 is the last one. Raises UnsupportedModel."""
    if isinstance(layer, int):
        tap = layer if layer >= 0 else depth + 1 + layer
        if 0 < tap <= depth:
            return tap
    raise UnsupportedModel(
        f"vision_feature_layer {layer} with {depth} layers; accepted: one, 1 to {depth} or -{depth} to -1"
    )
