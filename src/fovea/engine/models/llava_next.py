"""LLaVA-NeXT: LLaVA over a grid of tiles."""

from __future__ import annotations

from fovea.engine.models.llava import TiledLlava
from fovea.engine.vision.encoding import Tiler


class LlavaNext(TiledLlava):
    """LLaVA-NeXT, which keeps all patches of all tiles."""

    def tiler(self) -> Tiler:
        return self
