"""Fovea serves vision-language models: it sees more where it matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from fovea.core.sampling import SamplingParams
    from fovea.engine.engine import Engine


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use: `import fovea` alone must not pull torch."""
    if name == "Engine":
        from fovea.engine.engine import Engine

        return Engine
    if name == "SamplingParams":
        from fovea.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'fovea' has no attribute {name!r}")
