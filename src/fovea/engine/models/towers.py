"""Converts transformers' configurations of vision towers to our own."""

from __future__ import annotations

from typing import Any

from fovea.core.errors import UnsupportedModel
from fovea.engine.vision.gemma4 import Gemma4VisionConfig
from fovea.engine.vision.glm4v import Glm4vVisionConfig
from fovea.engine.vision.mllama import MllamaVisionConfig
from fovea.engine.vision.vit import ViTConfig

QK_NORM_EPS = 1e-6
"""Epsilon of the norms of InternVL's queries and keys, whatever `layer_norm_eps` is."""


def clip_tower(vision: Any, taps: tuple[int, ...]) -> ViTConfig:
    """Shape of a CLIP tower. taps: see `ViTConfig`."""
    return _tower(vision, taps, class_token=True, patch_bias=False, pre_norm=True, post_norm=False)


def siglip_tower(vision: Any, taps: tuple[int, ...], *, post_norm: bool = False) -> ViTConfig:
    """Shape of a SigLIP tower. taps: see `ViTConfig`. post_norm: the last norm is applied as well."""
    return _tower(vision, taps, class_token=False, patch_bias=True, pre_norm=False, post_norm=post_norm)


def internvl_tower(vision: Any, taps: tuple[int, ...], *, post_norm: bool) -> ViTConfig:
    """Shape of an InternVL tower. taps: see `ViTConfig`. post_norm: the last norm is applied as well.

    Raises UnsupportedModel.
    """
    image, patch = set(vision.image_size), set(vision.patch_size)
    if len(image) != 1 or len(patch) != 1:
        raise UnsupportedModel(
            f"image_size {vision.image_size} with patch_size {vision.patch_size}; accepted: squares, "
            "such as [448, 448] and [14, 14]"
        )
    if vision.norm_type not in ("layer_norm", "rms_norm"):
        raise UnsupportedModel(f"norm_type {vision.norm_type!r}; accepted: layer_norm and rms_norm")
    if not vision.use_absolute_position_embeddings:
        raise UnsupportedModel("use_absolute_position_embeddings is false; accepted: true")
    return _tower(
        vision,
        taps,
        class_token=True,
        patch_bias=True,
        pre_norm=False,
        post_norm=post_norm,
        image_size=image.pop(),
        patch_size=patch.pop(),
        rms_norm=vision.norm_type == "rms_norm",
        qkv_bias=vision.attention_bias,
        qk_norm=QK_NORM_EPS if vision.use_qk_norm else None,
        layer_scale=True,
    )


def naflex_tower(vision: Any) -> ViTConfig:
    """Shape of a SigLIP 2 tower for pictures of any size. Its table of positions is square."""
    side = int(vision.num_patches**0.5)
    taps, size = (vision.num_hidden_layers,), side * vision.patch_size
    kind = {"class_token": False, "patch_bias": True, "pre_norm": False, "post_norm": True}
    return _tower(vision, taps, **kind, image_size=size)


def _tower(vision: Any, taps: tuple[int, ...], **shape: Any) -> ViTConfig:
    """Shape of a tower with the layers up to the last tap; later layers are not built.

    shape: fields of `ViTConfig`; sizes that it lacks are those of the configuration.
    """
    return ViTConfig(
        hidden=vision.hidden_size,
        depth=max(taps),
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        eps=vision.layer_norm_eps,
        channels=vision.num_channels,
        taps=taps,
        **{"image_size": getattr(vision, "image_size", None), "patch_size": vision.patch_size} | shape,
    )


def glm4v_tower(vision: Any) -> Glm4vVisionConfig:
    """Shape of the tower of GLM-4.1V. Raises UnsupportedModel for edges that are not one number."""
    for name in ("image_size", "patch_size", "temporal_patch_size"):
        if not isinstance(getattr(vision, name), int):
            raise UnsupportedModel(f"{name} is {getattr(vision, name)!r}; accepted: an integer, such as 14")
    return Glm4vVisionConfig(
        depth=vision.depth,
        hidden=vision.hidden_size,
        heads=vision.num_heads,
        # In this family the blocks' MLPs have the width of the decoder, and the projector has its own.
        intermediate=vision.out_hidden_size,
        out_hidden=vision.out_hidden_size,
        projector_intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        eps=vision.rms_norm_eps,
        qkv_bias=bool(vision.attention_bias),
        channels=vision.in_channels,
        side=vision.image_size // vision.patch_size,
        patch=vision.patch_size,
        temporal=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        theta=axial_theta(vision),
    )


def gemma4_tower(vision: Any) -> Gemma4VisionConfig:
    """Shape of the tower of Gemma 4. Raises UnsupportedModel."""
    heads, size = vision.num_attention_heads, vision.head_dim
    if vision.num_key_value_heads != heads or heads * size != vision.hidden_size:
        raise UnsupportedModel(
            f"vision tower with {heads} heads, {vision.num_key_value_heads} of keys and values, of size "
            f"{size}, and hidden_size {vision.hidden_size}; accepted: as many heads of keys and values, "
            "which divide hidden_size"
        )
    return Gemma4VisionConfig(
        depth=vision.num_hidden_layers,
        hidden=vision.hidden_size,
        heads=heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_activation,
        eps=vision.rms_norm_eps,
        patch=vision.patch_size,
        longest=vision.position_embedding_size,
        theta=axial_theta(vision),
        pool=vision.pooling_kernel_size,
        clipped=bool(vision.use_clipped_linears),
        standardized=bool(vision.standardize),
    )


def axial_theta(vision: Any) -> float:
    """Base of the rotary frequencies of a tower whose angles turn with rows and columns.

    Raises UnsupportedModel for rotary positions of another kind, and for heads that they do not divide.
    """
    size = vision.hidden_size // vision.num_attention_heads
    if size % 4:
        raise UnsupportedModel(f"vision heads of size {size}: accepted are multiples of 4, such as 64")
    parameters = getattr(vision, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "axial")
    if kind != "axial":
        raise UnsupportedModel(f"vision RoPE of type {kind!r} is not supported; supported: axial")
    return float(parameters.get("rope_theta", 10000.0))


def mllama_tower(vision: Any) -> MllamaVisionConfig:
    """Shape of the tower of Llama 3.2 Vision. Raises UnsupportedModel."""
    for name in ("image_size", "patch_size"):
        if not isinstance(getattr(vision, name), int):
            raise UnsupportedModel(f"{name} is {getattr(vision, name)!r}; accepted: an integer, such as 14")
    taps = tuple(vision.intermediate_layers_indices)
    if not taps or not all(0 <= tap < vision.num_hidden_layers for tap in taps):
        raise UnsupportedModel(
            f"intermediate_layers_indices {list(taps)}; accepted: some of 0 to {vision.num_hidden_layers - 1}"
        )
    shape = MllamaVisionConfig(
        hidden=vision.hidden_size,
        depth=vision.num_hidden_layers,
        global_depth=vision.num_global_layers,
        heads=vision.attention_heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        eps=vision.norm_eps,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        channels=vision.num_channels,
        tiles=vision.max_num_tiles,
        grids=len(vision.supported_aspect_ratios),
        taps=taps,
    )
    if vision.vision_output_dim != shape.width:
        raise UnsupportedModel(
            f"vision_output_dim is {vision.vision_output_dim}; accepted: {shape.width}, which is hidden_size "
            f"times the last output and {len(taps)} intermediate ones"
        )
    return shape
