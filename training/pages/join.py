"""Joins a tower that reads (`pages.read`) with text layers that answer from letters (`pages.letters`).

Both were taught the language of `spelling`. Training then goes on with everything at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from model import Fovea
from pages.letters import Spelled


@torch.no_grad()
def join(model: Fovea, run: Path) -> float:
    """Give `model` the averaged weights of both parts in the folder `run`.

    Returns the seconds of work of both trainings.
    """
    speller = Spelled()
    seconds = adopt(model, run / "read.pt") + adopt(speller, run / "letters.pt")
    model.model["language_model"].load_state_dict(speller.model["language_model"].state_dict())
    for merger in model.model["visual"].deepstack_merger_list:  # the text layers know no features yet
        merger.linear_fc2.weight.zero_()
        merger.linear_fc2.bias.zero_()
    return seconds


@torch.no_grad()
def adopt(model: nn.Module, file: Path) -> float:
    """Load a run's averaged weights. Returns the seconds of work that they took."""
    state: dict[str, Any] = torch.load(file, map_location="cpu")
    for mine, theirs in zip(model.parameters(), state["averaged"], strict=True):
        mine.copy_(theirs)
    return float(state["seconds"])
