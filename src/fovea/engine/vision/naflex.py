"""The NaFlex variant of SigLIP 2 (arXiv 2502.14786): pictures of any size and shape, with learned positions.

The positions are a table for a square grid. For a picture it is resampled to the picture's own grid of
patches, with an antialiased bilinear filter. Every picture is encoded alone, so there is no padding.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.linear import Embedding, PatchLinear
from fovea.engine.layers.norm import LayerNorm
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, cuts, slice_rows
from fovea.engine.vision.vit import Encoder, ViTConfig

MAX_TABLES = 64
"""Most resampled tables that are kept."""


class _Embeddings(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.side = config.side
        values = config.channels * config.patch_size**2
        # The checkpoint's own shape is that of a linear map over the values of a patch.
        self.patch_embedding = PatchLinear((values,), config.hidden, bias=True)
        self.position_embedding = Embedding(config.side**2, config.hidden)
        self._tables: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Embed the patches of pictures of one grid: (pictures, patches, values) to (..., hidden)."""
        x: Tensor = self.patch_embedding(patches)
        return x + self._table(grid)

    def _table(self, grid: tuple[int, int]) -> Tensor:
        """Positions of a grid (rows, columns), (patches, hidden). They do not depend on earlier calls."""
        table = self._tables.get(grid)
        if table is None:
            weight = self.position_embedding.weight
            square = weight.float().view(self.side, self.side, -1).permute(2, 0, 1)[None]
            resized = functional.interpolate(
                square, size=grid, mode="bilinear", align_corners=False, antialias=True
            )
            table = self._tables[grid] = resized[0].flatten(1).T.to(weight.dtype).contiguous()
            if len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(grid)
        return table


class NaflexTower(nn.Module):
    """The vision tower. Its attribute names are those of the checkpoints."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = LayerNorm(config.hidden, config.eps)

    def slices(self, patches: Tensor, grid: tuple[int, int]) -> Slices[Tensor]:
        """Encode pictures of one grid (rows, columns), one layer of some pictures at a time.

        patches: (pictures, rows * columns, channels * patch * patch).

        Returns (pictures, rows * columns, hidden).
        """
        x = self.embeddings(patches, grid)
        at_once = slice_rows(x) // x.shape[1]
        for layer in self.encoder.layers:
            outputs = []
            for some in cuts(x.shape[0], at_once):
                outputs.append(layer(x[some], None))
                yield
            x = torch.cat(outputs)
        return self.post_layernorm(x)  # type: ignore[no-any-return]

    def shape(self, pictures: list[tuple[int, tuple[int, int]]], *, rows_per_token: int) -> VisualShape:
        """Count the rows that are computed. pictures: (number of pictures, their grid)."""
        rows = sum(count * grid[0] * grid[1] for count, grid in pictures)
        pairs = sum(count * (grid[0] * grid[1]) ** 2 for count, grid in pictures)
        projected = rows // rows_per_token
        return VisualShape(rows, rows, projected, self.config.hidden, self.config.depth * pairs)
