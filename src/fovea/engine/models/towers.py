"""Converts transformers' configurations of plain vision transformers to `ViTConfig`."""

from __future__ import annotations

from typing import Any

from fovea.engine.vision.vit import ViTConfig


def clip_tower(vision: Any, taps: tuple[int, ...]) -> ViTConfig:
    """Shape of a CLIP tower. taps: see `ViTConfig`."""
    return _tower(vision, taps, class_token=True, patch_bias=False, pre_norm=True, post_norm=False)


def siglip_tower(vision: Any, taps: tuple[int, ...], *, post_norm: bool = False) -> ViTConfig:
    """Shape of a SigLIP tower. taps: see `ViTConfig`. post_norm: the last norm is applied as well."""
    return _tower(vision, taps, class_token=False, patch_bias=True, pre_norm=False, post_norm=post_norm)


def naflex_tower(vision: Any) -> ViTConfig:
    """Shape of a SigLIP 2 tower for pictures of any size. Its table of positions is square."""
    side = int(vision.num_patches**0.5)
    return ViTConfig(
        hidden=vision.hidden_size,
        depth=vision.num_hidden_layers,
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        eps=vision.layer_norm_eps,
        image_size=side * vision.patch_size,
        patch_size=vision.patch_size,
        channels=vision.num_channels,
        class_token=False,
        patch_bias=True,
        pre_norm=False,
        post_norm=True,
        taps=(vision.num_hidden_layers,),
    )


def _tower(vision: Any, taps: tuple[int, ...], **kind: bool) -> ViTConfig:
    """Shape of a tower with the layers up to the last tap; later layers are not built."""
    return ViTConfig(
        hidden=vision.hidden_size,
        depth=max(taps),
        heads=vision.num_attention_heads,
        intermediate=vision.intermediate_size,
        activation=vision.hidden_act,
        eps=vision.layer_norm_eps,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        channels=vision.num_channels,
        taps=taps,
        **kind,
    )
