"""Fovea serves vision-language models: it sees more where it matters."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fovea.core.constraints import AnswerFormat
    from fovea.core.errors import FoveaError
    from fovea.core.media import PixelBudget, VideoBudget, VisualTokens
    from fovea.core.sampling import SamplingParams
    from fovea.engine.engine import Engine

# OpenMP reads this when torch is loaded, so fovea should be imported first. Otherwise torch's idle threads
# spin for milliseconds, on cores that the C++ kernels' threads need: products of two threads then took up to
# 1.5 times as long. Beside other programs it is worse: a token took 290 ms instead of 2.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

__version__ = "0.1.0"
__all__ = [
    "AnswerFormat",
    "Engine",
    "FoveaError",
    "PixelBudget",
    "SamplingParams",
    "VideoBudget",
    "VisualTokens",
    "__version__",
]

_LAZY = {
    "AnswerFormat": "fovea.core.constraints",
    "Engine": "fovea.engine.engine",
    "FoveaError": "fovea.core.errors",
    "PixelBudget": "fovea.core.media",
    "SamplingParams": "fovea.core.sampling",
    "VideoBudget": "fovea.core.media",
    "VisualTokens": "fovea.core.media",
}


def __getattr__(name: str) -> Any:
    """The public names, loaded on first use: `import fovea` alone must not pull torch."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fovea' has no attribute {name!r}")
