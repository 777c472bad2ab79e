"""Image and video processors: from decoded pixels to the input of a vision encoder. It must not import torch.

There is one file per kind of model, with numpy and PIL only.

`build` picks the kind by the checkpoint's `model_type`. A processor first makes a `VisualPlan` from an
image's dimensions alone (how many tokens, which prompt text, which cache key), and later turns pixels into
arrays. Results equal those of the checkpoint's own Hugging Face PIL processor bit for bit at the default
budget.
"""

from __future__ import annotations

from fovea.engine.vision.processor.base import ImageProcessor, ProcessedImage, VisualPlan
from fovea.engine.vision.processor.registry import build, model_types

__all__ = ["ImageProcessor", "ProcessedImage", "VisualPlan", "build", "model_types"]
