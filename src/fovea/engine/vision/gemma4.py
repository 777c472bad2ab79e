"""The vision tower of Gemma 4: pictures of any aspect, positions in two dimensions, averages of squares.

A patch has a learned position for its column and one for its row, and rotary positions whose first half turns
with the column. Patches are held row by row. Every image is encoded alone, so the attention needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import FusedLinear, LayerList, Linear, PatchLinear, parameter
from fovea.engine.vision.calls import apply_by_rows, run_blocks
from fovea.engine.vision.encoding import Slices, VisualShape
from fovea.kernels.activation import ACTIVATIONS, check_activation
from fovea.kernels.base import Kernels
from fovea.kernels.torch_kernels import PLAIN
from fovea.planner.shape import Tower


class ClippedLinear(nn.Module):
    """A linear map of clipped inputs to clipped outputs. Each bound is one number."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = Linear(in_features, out_features, bias=False)
        self.input_min, self.input_max = parameter(), parameter()
        self.output_min, self.output_max = parameter(), parameter()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.clamp(self.input_min, self.input_max))
        return y.clamp(self.output_min, self.output_max)


class ClippedGatedMLP(nn.Module):
    """The block down(act(gate(x)) * up(x)) of clipped maps."""

    def __init__(self, hidden: int, intermediate: int, act: str) -> None:
        super().__init__()
        self.act = check_activation(act)
        self.gate_proj = ClippedLinear(hidden, intermediate)
        self.up_proj = ClippedLinear(hidden, intermediate)
        self.down_proj = ClippedLinear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.act](self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Gemma4VisionConfig:
    """Shape of a Gemma 4 tower.

    patch: side of a patch, in pixels.
    longest: rows, and columns, of patches that have a learned position.
    theta: base of the rotary frequencies.
    pool: patches along the side of a square that becomes one token.
    clipped: the linear maps of the blocks have bounds for inputs and outputs.
    standardized: the tokens are shifted and scaled by a number per column.
    """

    depth: int
    hidden: int
    heads: int
    intermediate: int
    activation: str
    eps: float
    patch: int
    longest: int
    theta: float
    pool: int
    clipped: bool
    standardized: bool


class Norm(nn.Module):
    """RMSNorm that multiplies by the weight in float32, before the only rounding.

    width: width of the rows; None: there is no weight.
    """

    def __init__(self, width: int | None, eps: float) -> None:
        super().__init__()
        self.weight = None if width is None else parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float()
        return functional.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)


class _PatchEmbedder(nn.Module):
    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.input_proj = PatchLinear((3 * config.patch**2,), config.hidden, bias=False)
        self.position_embedding_table = parameter(2, config.longest, config.hidden)

    def forward(self, patches: Tensor) -> Tensor:
        """Project patches (rows, values) of float32 numbers in [0, 1]."""
        dtype = self.position_embedding_table.dtype
        return self.input_proj((2 * (patches - 0.5)).to(dtype))  # type: ignore[no-any-return]

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Learned positions of the patches of a grid (rows, columns), (rows * columns, hidden)."""
        table = self.position_embedding_table
        return (table[0, None, : grid[1]] + table[1, : grid[0], None]).flatten(0, 1)


class _Attention(nn.Module):
    """The projections and norms around the attention. The attention itself divides scores by sqrt(size)."""

    kernels: Kernels = PLAIN

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.heads, self.eps = config.heads, config.eps
        width, names = config.hidden, ("q_proj", "k_proj", "v_proj")
        self.qkv: FusedLinear | None = None
        self.o_proj: nn.Module
        if config.clipped:
            for name in names:
                self.add_module(name, ClippedLinear(width, width))
            self.o_proj = ClippedLinear(width, width)
        else:
            outputs = {f"{name}.linear": width for name in names}
            self.qkv = FusedLinear(width, outputs, bias=False)
            self.o_proj = _Wrapped(width, width)
        self.q_norm = Norm(width // config.heads, config.eps)
        self.k_norm = Norm(width // config.heads, config.eps)

    def project(self, x: Tensor) -> Tensor:
        """Normalised queries, keys and values of rows x, not rotated: (T, 3 * heads, head_dim).

        The model does not scale its scores, so queries are multiplied by the divisor of the attention. The
        two middle quarters of queries and keys are exchanged: numbers that rotate together are then half a
        head apart, as in `Kernels.rotate`, and scores remain the same.
        """
        if self.qkv is not None:
            qkv: Tensor = self.qkv(x)
        else:
            qkv = torch.cat([self.get_submodule(name)(x) for name in ("q_proj", "k_proj", "v_proj")], dim=-1)
        heads = qkv.view(x.shape[0], 3, self.heads, -1)
        size = heads.shape[-1]
        normed = functional.rms_norm(heads.float(), (size,), None, self.eps)
        assert self.q_norm.weight is not None
        assert self.k_norm.weight is not None
        normed[:, 0] *= self.q_norm.weight.float() * size**0.5
        normed[:, 1] *= self.k_norm.weight.float()
        quarters = normed[:, :2].reshape(*normed[:, :2].shape[:-1], 2, 2, size // 4)
        quarters = quarters.transpose(-3, -2).flatten(-3)
        return torch.cat((quarters, normed[:, 2:]), dim=1).to(x.dtype).flatten(1, 2)


class _Wrapped(nn.Module):
    """A linear map under the name that checkpoints give to maps without bounds."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = Linear(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class _GatedMLP(nn.Module):
    """The block down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, act: str) -> None:
        super().__init__()
        outputs = dict.fromkeys(("gate_proj.linear", "up_proj.linear"), intermediate)
        self.gate_up = FusedLinear(hidden, outputs, bias=False, activation=act, gated=True)
        self.down_proj = _Wrapped(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up(x))  # type: ignore[no-any-return]


class Gemma4Block(nn.Module):
    """One transformer block: attention and gated MLP, each between two norms."""

    rowwise = ("before", "after")

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        mlp = ClippedGatedMLP if config.clipped else _GatedMLP
        self.mlp = mlp(config.hidden, config.intermediate, config.activation)
        self.input_layernorm = Norm(config.hidden, config.eps)
        self.post_attention_layernorm = Norm(config.hidden, config.eps)
        self.pre_feedforward_layernorm = Norm(config.hidden, config.eps)
        self.post_feedforward_layernorm = Norm(config.hidden, config.eps)

    @property
    def attention(self) -> _Attention:
        return self.self_attn

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of rows x (T, hidden), not rotated: (T, 3 * heads, head_dim)."""
        return self.self_attn.project(self.input_layernorm(x))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of rows x, queries and keys rotated."""
        return self.self_attn.kernels.rotate(self.project(x), 2 * self.self_attn.heads, cos, sin)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Apply output projection, norms and MLP to attention output `mixed` of rows x, both (T, hidden)."""
        x = x + self.post_attention_layernorm(self.self_attn.o_proj(mixed))
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed)  # type: ignore[no-any-return]


class Gemma4Tower(nn.Module):
    """A Gemma 4 tower. Its attribute names are those of the checkpoints."""

    def __init__(self, config: Gemma4VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = _PatchEmbedder(config)
        self.encoder = LayerList(Gemma4Block(config) for _ in range(config.depth))
        self.std_bias = self.std_scale = None
        if config.standardized:
            self.std_bias, self.std_scale = parameter(config.hidden), parameter(config.hidden)

    def slices(self, patches: Tensor, grid: tuple[int, int]) -> Slices[Tensor]:
        """Encode the patches of one image, one slice at a time.

        patches: float32 (rows * columns, patch * patch * 3) in [0, 1], row by row.
        grid: (rows, columns) of patches, multiples of `pool`.

        Returns (rows * columns / pool^2, hidden).
        """
        x = yield from apply_by_rows(self.patch_embedder, patches)
        x += self.patch_embedder.positions(grid)
        rotation = self._rotation(grid, x)
        blocks = cast("list[Gemma4Block]", list(self.encoder.layers))
        x = yield from run_blocks(blocks, x, *rotation, (((1, x.shape[0]),),))
        return self._pooled(x, grid)

    def shape(self, grid: tuple[int, int]) -> VisualShape:
        """Count the rows that are computed for a grid (rows, columns) of patches."""
        rows, config = grid[0] * grid[1], self.config
        return VisualShape(rows, rows, rows // config.pool**2, config.hidden, config.depth * rows**2)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        config, pooled = self.config, self.config.pool**2
        return Tower(config.hidden, pooled, full_layers=config.depth, projector_rows_per_patch=1 / pooled)

    def _pooled(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Average the patches of each square. The averages become large, so they are scaled in float32."""
        pool, dtype = self.config.pool, x.dtype
        squares = x.view(grid[0] // pool, pool, grid[1] // pool, pool, -1).float()
        averages = squares.mean(dim=(1, 3)).flatten(0, 1).to(dtype)
        tokens: Tensor = averages.float() * self.config.hidden**0.5
        if self.std_bias is not None and self.std_scale is not None:
            tokens = (tokens - self.std_bias.float()) * self.std_scale.float()
        return tokens.to(dtype)

    def _rotation(self, grid: tuple[int, int], x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary positions of patches, rounded to the type of x.

        Each is (patches, 1, head_dim) float32. A half of them is for the column, then the row, of a patch;
        the other half is equal.
        """
        half = self.config.hidden // self.config.heads // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=x.device)
        inverse = 1.0 / (self.config.theta ** (steps / half))
        rows, columns = (torch.arange(count, dtype=torch.float32, device=x.device) for count in grid)
        down = (rows[:, None] * inverse)[:, None].expand(-1, grid[1], -1)
        across = (columns[:, None] * inverse)[None].expand(grid[0], -1, -1)
        angles = torch.cat((across, down, across, down), dim=-1).flatten(0, 1)[:, None]
        return angles.cos().to(x.dtype).float(), angles.sin().to(x.dtype).float()


class Gemma4Projector(nn.Module):
    """A norm without a weight, and a linear map to the decoder's width."""

    rowwise = ("forward",)

    def __init__(self, vision: int, text: int, eps: float) -> None:
        super().__init__()
        self.embedding_pre_projection_norm = Norm(None, eps)
        self.embedding_projection = Linear(vision, text, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding_projection(self.embedding_pre_projection_norm(x))  # type: ignore[no-any-return]
