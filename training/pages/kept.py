"""The two parts of fovea-page that the repository keeps, so that a training can go on where another ended.

A tower that reads (`pages.read`), and text layers that answer from letters (`pages.letters`), in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from loop import Run
from model import Fovea

TOWER, TEXT = (Path(__file__).with_name(f"{name}.safetensors") for name in ("tower", "text"))
FOLLOWED = {TOWER: "model.visual.", TEXT: "model.language_model."}
"""The beginning of the names of each part's weights. What DeepStack adds is learnt when both are joined."""


def begin(model: Fovea, file: Path) -> None:
    """Give `model` the part of its weights that is kept in `file`."""
    kept = {name: value.float() for name, value in load_file(file).items()}
    model.load_state_dict(kept, strict=False)


def keep(run: Run, file: Path) -> None:
    """Write the averaged weights of a part."""
    averages = zip(run.model.named_parameters(), run.averages, strict=True)
    kept = {
        name: average.to(torch.bfloat16).contiguous()
        for (name, _), average in averages
        if name.startswith(FOLLOWED[file]) and "deepstack" not in name
    }
    save_file(kept, file)
