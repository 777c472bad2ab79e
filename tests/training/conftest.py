from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "training"
NAMES = ("batches", "common", "dense", "draft", "model", "packing", "several")


@pytest.fixture(scope="session")
def training() -> Iterator[SimpleNamespace]:
    """The modules of the folder `training`, and a `packer`. The modules import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        modules = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
        modules.packer = modules.packing.Packer(str(modules.common.ASSETS / "tokenizer.json"))
        yield modules
