"""LLaVA-NeXT: LLaVA over a grid of tiles."""

from __future__ import annotations

from fovea.engine.models.llava import TiledLlava


class LlavaNext(TiledLlava):
    """All tiles' patches are kept."""
