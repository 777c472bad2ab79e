"""Bounds of the numbers in config.json. A model is built from them before any weight is read.

Without bounds, a billion layers would be built one by one, and a wrong type would end in a bare TypeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError

BOUNDS: Mapping[str, int] = {
    "num_hidden_layers": 1024,
    "depth": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_heads": 4096,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 17,
    "embed_dim": 1 << 17,
    "out_hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "mlp_dim": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "n_routed_experts": 1 << 16,
    "output_channels": 1 << 17,
    "downsample_channels": 1 << 17,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "num_position_embeddings": 1 << 24,
    "image_size": 1 << 16,
    "patch_size": 1 << 12,
    "spatial_merge_size": 64,
    "temporal_patch_size": 64,
    "window_size": 1 << 16,
    "num_channels": 64,
    "in_channels": 64,
    "scale_factor": 64,
}
"""Largest value of each field, in config.json and all of its sections; the smallest is 1."""
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields with the id of a token."""


def check_bounds(config: Mapping[str, Any], path: Path) -> None:
    """Check the numbers of a configuration and of its sections.

    path: the file, for errors.
    Raises CheckpointError, naming the field and the accepted range.
    """
    waiting = [("", config)]
    while waiting:
        prefix, section = waiting.pop()
        for name, value in section.items():
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{name}.", value))
            elif name in BOUNDS and value is not None:
                _check(path, prefix + name, value, 1, BOUNDS[name])
            elif name in TOKENS and value is not None:
                _check(path, prefix + name, value, 0, BOUNDS["vocab_size"])
        _check_heads(path, prefix, section)


def _check_heads(path: Path, prefix: str, section: Mapping[str, Any]) -> None:
    """Check that a width is a multiple of the heads, and the heads one of the key-value heads.

    Raises CheckpointError.
    """
    heads = next((name for name in ("num_heads", "num_attention_heads") if section.get(name)), "")
    pairs = [(heads, "num_key_value_heads")]
    if not section.get("head_dim"):
        pairs.append(("embed_dim" if section.get("embed_dim") else "hidden_size", heads))
    for whole, part in pairs:
        left, right = section.get(whole), section.get(part)
        if isinstance(left, int) and isinstance(right, int) and left % right:
            raise CheckpointError(
                f"{path}: {prefix}{whole} is {left}; accepted: a multiple of {prefix}{part} ({right})",
                param=prefix + whole,
            )


def _check(path: Path, name: str, value: Any, low: int, high: int) -> None:
    values = value if isinstance(value, list) and value else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values):
        raise CheckpointError(
            f"{path}: {name} is {str(value)[:100]}; accepted: integers from {low} to {high}", param=name
        )
