"""The vision tower of GLM-4.1V (arXiv 2507.01006) for pictures of any size.

Its blocks are RMSNorm blocks without biases. A norm follows the patch embedding. Learned positions are
interpolated bicubically, and rotary positions turn queries and keys in addition. A convolution joins the
patches of a visual token, and a gated projector follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import (
    Embedding,
    FusedLinear,
    GatedMLP,
    LayerNorm,
    Linear,
    PatchLinear,
    RMSNorm,
)
from fovea.engine.vision.any_size import At, Block, FullAttention, PositionTable, TappedAttention
from fovea.engine.vision.calls import ProjectorLayer, RotaryBlock, apply_by_rows
from fovea.engine.vision.encoding import Slices, VisualShape, run_to_end
from fovea.planner.shape import Tower


@dataclass(frozen=True, slots=True)
class Glm4vVisionConfig:
    """Shape of the tower.

    depth, hidden, heads: number of blocks, their width, and their heads.
    intermediate: inner width of the blocks' MLPs.
    out_hidden: width of a visual token, in the projector and after it.
    projector_intermediate: inner width of the projector.
    activation: of the MLPs and the projector's gate.
    eps: constant of the RMS norms.
    qkv_bias: whether queries, keys and values have a bias.
    side: rows, and columns, of the table of learned positions.
    patch, temporal: side of a patch in pixels, and frames that it joins.
    merge: patches per side of a visual token.
    theta: base of the rotary frequencies.
    """

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    projector_intermediate: int
    activation: str
    eps: float
    qkv_bias: bool
    channels: int
    side: int
    patch: int
    temporal: int
    merge: int
    theta: float


class _PatchEmbed(nn.Module):
    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        kernel = (config.channels, config.temporal, config.patch, config.patch)
        self.proj = PatchLinear(kernel, config.hidden, bias=True)


class _Positions(nn.Module):
    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.position_embedding = Embedding(config.side**2, config.hidden)


class _Merger(nn.Module):
    """The projector after the convolution: a linear map, a norm, GELU, and a gated MLP. Rows in and out."""

    rowwise = ("forward",)

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        width, inner = config.out_hidden, config.projector_intermediate
        self.proj = Linear(width, width, bias=False)
        self.post_projection_norm = LayerNorm(width, 1e-5)
        outputs = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = FusedLinear(width, outputs, bias=False, activation=config.activation, gated=True)
        self.down_proj = Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.post_projection_norm(self.proj(x)))
        return self.down_proj(self.gate_up(x))  # type: ignore[no-any-return]


class Glm4vTower(nn.Module):
    """The tower with its projector, an `AnySizeTower`. Its attribute names are those of the checkpoints."""

    def __init__(self, config: Glm4vVisionConfig) -> None:
        super().__init__()
        self.config = config
        table = PositionTable(config.side, corners=False, cubic=True)
        head_dim = config.hidden // config.heads
        self.full = FullAttention(table, config.merge, config.heads, head_dim, config.theta)
        self.patch_embed = _PatchEmbed(config)
        self.embeddings = _Positions(config)
        self.post_conv_layernorm = RMSNorm(config.hidden, config.eps)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(config.hidden, config.eps)
        self.downsample = PatchLinear(
            (config.hidden, config.merge, config.merge), config.out_hidden, bias=True
        )
        self.merger = _Merger(config)

    @property
    def merge(self) -> int:
        return self.config.merge

    @property
    def crop_invariant(self) -> bool:
        return False

    @property
    def corners(self) -> bool:
        return self.full.table.corners

    @property
    def patch_weight(self) -> Tensor:
        return self.patch_embed.proj.weight

    def slices(
        self, patches: Tensor, grid: tuple[int, int, int], at: At = None
    ) -> Slices[tuple[Tensor, list[Tensor]]]:
        """Encode patches to visual tokens, see `AnySizeTower.slices`."""
        x = yield from self._embed(patches, grid, at)
        x = yield from self.full.run(self._blocks, x, grid)
        x = yield from apply_by_rows(ProjectorLayer(self._join), x, unit=self.merge**2)
        return (yield from apply_by_rows(ProjectorLayer(self.merger), x)), []

    def tap(self, patches: Tensor, grid: tuple[int, int, int]) -> TappedAttention:
        """Attention inputs of the last block, see `AnySizeTower.tap`."""
        return self.full.tap(self._blocks, run_to_end(self._embed(patches, grid, None)), grid)

    def shape(self, grid: tuple[int, int, int]) -> VisualShape:
        """Count the rows that are computed for a grid (t, h, w) of patches. Any thread may call it."""
        return self.full.shape(grid, self.config.depth)

    def tower_shape(self) -> Tower:
        """Return the numbers from which the rows of an image follow."""
        return self.full.tower_shape(self.config.depth)

    @property
    def _blocks(self) -> list[RotaryBlock]:
        return cast("list[RotaryBlock]", list(self.blocks))

    def _embed(self, patches: Tensor, grid: tuple[int, int, int], at: At) -> Slices[Tensor]:
        x = yield from apply_by_rows(self._embed_rows, patches)
        return (yield from self.full.add_learned(x, self.embeddings.position_embedding, grid, at))

    def _embed_rows(self, patches: Tensor) -> Tensor:
        return self.post_conv_layernorm(self.patch_embed.proj(patches))  # type: ignore[no-any-return]

    def _join(self, x: Tensor) -> Tensor:
        """Join the patches of each visual token: rows (T, hidden) to (T / merge^2, out_hidden)."""
        tokens = self.post_layernorm(x).view(-1, self.merge**2, x.shape[1])
        return self.downsample(tokens.transpose(1, 2).flatten(1))  # type: ignore[no-any-return]


def _block(config: Glm4vVisionConfig) -> Block:
    return Block(
        config.hidden,
        config.heads,
        lambda: RMSNorm(config.hidden, config.eps),
        GatedMLP(config.hidden, config.intermediate, config.activation, bias=False),
        qkv_bias=config.qkv_bias,
        out_bias=False,
    )
