"""Per-layer embeddings (Gemma 4): every layer gets a small input of its own for each row.

A table holds one embedding per token and layer. A normalised linear map of the row's input embedding is
added to it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fovea.engine.layers.config import PerLayer
from fovea.engine.layers.linear import Embedding, Linear
from fovea.engine.layers.norm import RMSNorm


class PerLayerEmbeddings(nn.Module):
    """The table of all layers' embeddings, and the map from input embeddings to as many numbers."""

    def __init__(self, hidden: int, layers: int, config: PerLayer, eps: float) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        self.table = Embedding(config.vocab_size, layers * config.width)
        self.projection = Linear(hidden, layers * config.width, bias=False)
        self.norm = RMSNorm(config.width, eps)

    def forward(self, ids: Tensor, x: Tensor, visual_rows: Tensor | None) -> Tensor:
        """Return the embeddings of rows, (T, layers, width).

        ids: (T,), token ids.
        x: (T, hidden), the decoder's input embeddings of these rows.
        visual_rows: numbers of the rows of visual tokens; None: there are none.
        """
        if visual_rows is not None:
            ids = ids.index_fill(0, visual_rows, self.config.padding)
        shape = (len(ids), self.layers, self.config.width)
        of_tokens: Tensor = self.table(ids).view(shape)
        # As for the input embeddings, the factor is rounded to the model's type and stays on the host.
        of_tokens = of_tokens * torch.tensor(self.config.width**0.5, dtype=x.dtype)
        of_rows = self.norm((self.projection(x) * x.shape[1] ** -0.5).view(shape))
        return (of_rows + of_tokens) * 0.5**0.5  # type: ignore[no-any-return]


class PerLayerInput(nn.Module):
    """Adds a layer's own embeddings: x + norm(projection(act(gate(x)) * embedding))."""

    def __init__(self, hidden: int, config: PerLayer, eps: float) -> None:
        super().__init__()
        self.gate = Linear(hidden, config.width, bias=False, activation=config.activation)
        self.projection = Linear(config.width, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """x: (T, hidden). embeddings: (T, width), the layer's own."""
        return x + self.norm(self.projection(self.gate(x) * embeddings))  # type: ignore[no-any-return]
