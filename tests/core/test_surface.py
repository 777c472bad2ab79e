"""The public names of `fovea`, and the modules that importing it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fovea

BRAINS = [
    "fovea",
    "fovea.core.types",
    "fovea.core.protocols",
    "fovea.core.types",
    "fovea.engine.config",
    "fovea.engine.sequence",
    "fovea.engine.request.detokenize",
    "fovea.engine.schedule.scheduler",
    "fovea.engine.kv.manager",
    "fovea.engine.cache.embeddings",
]


def test_the_public_names() -> None:
    assert sorted(fovea.__all__) == [
        "AnswerFormat",
        "Engine",
        "FoveaError",
        "PixelBudget",
        "SamplingParams",
        "VideoBudget",
        "VisualTokens",
        "__version__",
    ]
    assert fovea.SamplingParams.__module__ == "fovea.core.sampling"
    assert fovea.Engine.__module__ == "fovea.engine.engine"
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = fovea.Motor


def test_code_that_decides_does_not_import_torch(tmp_path: Path) -> None:
    """Importing these modules must not import torch, transformers or numpy, directly or indirectly."""
    check = "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    code = f"import sys, {', '.join(BRAINS)}; {check}"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert process.stdout.strip() == "[]"
