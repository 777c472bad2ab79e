"""Says whether a checkpoint would load, and what is missing, without reading its weights."""

from __future__ import annotations

from fovea.engine.check.checkpoint import check_checkpoint
from fovea.engine.check.report import Finding, Report
from fovea.engine.check.shape import shape_of_config, shape_of_folder

__all__ = ["Finding", "Report", "check_checkpoint", "shape_of_config", "shape_of_folder"]
