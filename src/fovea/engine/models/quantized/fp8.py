"""Checkpoints of 8-bit floats (E4M3): with a scale for each block, each row or each tensor.

Scales multiply, although the tensors are called `weight_scale_inv`: they are the inverse of what the weights
were multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fovea.engine.models.quantized.base import (
    ITSELF,
    PLAIN_TYPES,
    Family,
    Fault,
    Part,
    Read,
    Settings,
    Weight,
    checked,
    required,
)
from fovea.engine.models.quantized.layouts import (
    GridWeight,
    grid_scales,
)

INVERSE, SCALE = "_scale_inv", ".weight_scale"


class Fp8(Family):
    """The methods "fp8" (a scale per block, as in Qwen's own checkpoints, or per tensor) and "fbgemm_fp8".

    content: the configuration. place: where it stands, for errors.
    Raises CheckpointError.
    """

    endings: ClassVar[Mapping[str, str]] = {
        # Experts are in one tensor, such as gate_up_proj, whose scales are gate_up_proj_scale_inv.
        INVERSE: "",
        SCALE: ".weight",
        ".input_scale": ".weight",
        ".activation_scale": ".weight",
        ".input_scale_ub": ".weight",
        ".k_scale": ".weight",
        ".v_scale": ".weight",
    }
    unused = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")

    def __init__(self, content: Mapping[str, Any], place: str) -> None:
        settings = Settings(content, place)
        static = settings.word("activation_scheme", "dynamic", ("dynamic", "static")) == "static"
        settings.word("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
        self._block = settings.block("weight_block_size")
        self.title = "fp8" if self._block is None else "fp8 blocks"
        self.notes = ("input_scale is not used: activations are not rounded",) if static else ()

    def weight(self, name: str, parts: Mapping[str, Part], read: Read) -> Weight:
        whole = checked(required(parts, ITSELF, name), ("F8_E4M3",))
        shape = whole.shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise Fault(name, f"has shape {str(list(shape))[:100]}; accepted: two or three axes, none empty")
        scale = parts.get(INVERSE) or required(parts, SCALE, name)
        if INVERSE in parts and SCALE in parts:
            raise Fault(name, "has weight_scale_inv and weight_scale; accepted: one of them")
        block, scales = grid_scales(scale, shape, self._block, (*PLAIN_TYPES, "F8_E8M0"))
        return GridWeight(
            shape, tuple(parts.values()), block, lambda read: read(whole).view(-1, shape[-1]), scales
        )
