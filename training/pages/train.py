"""Teaches fovea-page as a whole, from a tower that reads and text layers that answer (see `pages.join`).

    python -m pages.train --run runs/page --minutes 60
    python -m pages.train --run runs/page --minutes 60 --resume
    python -m pages.train --run runs/more --minutes 60 --bundled

`checkpoint.pt` in the run's folder is the state, `checkpoint.jsonl` its log. Minutes are minutes of work, as
in `train.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from safetensors.torch import load_file

from loop import Workers, options
from packing import Batch, Packer
from pages.asked import page_batch
from pages.config import MODEL, folder
from pages.crops import Store
from pages.join import join
from pages.parts import parts_batch
from pages.spelling import Reading
from pages.start import fix
from pages.trainer import Settings, Trainer, produce


@dataclass
class WholeSettings(Settings):
    """The command-line options of a run.

    bundled: begin with the weights in packages/page.
    """

    bundled: bool = False


def draw(rng: Random, packer: Packer, pages: Store, settings: WholeSettings) -> list[Batch]:
    """The batches of a step that only this training has."""
    batches = [parts_batch(rng, packer, pages, settings.parts)] if settings.parts else []
    left = settings.whole
    while left > 0:
        batches.append(page_batch(rng, packer, pages, settings.largest, 2 * settings.asked))
        left -= batches[-1]["images"][0, 0, ..., 0].size
    return batches


class Whole(Trainer):
    """The whole model, in training."""

    settings: WholeSettings

    def __init__(self, settings: WholeSettings) -> None:
        torch.manual_seed(settings.seed)
        model = Reading()
        model.model["visual"].patch_embed.requires_grad_(False)  # see `read.Reader`
        fix(model.model["language_model"])
        seconds = 0.0 if settings.resume else begin(model, settings)
        super().__init__(settings, model)
        if not settings.resume:
            self.earlier = seconds
            self.log()


def begin(model: Reading, settings: WholeSettings) -> float:
    """Join the two parts that were taught apart, or go on with the bundled weights.

    Returns the seconds of work before.
    """
    if not settings.bundled:
        return join(model, folder(settings.run))
    weights = load_file(MODEL / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
    return 0.0


def main() -> None:
    settings = options(__doc__, WholeSettings)
    trainer = Whole(settings)
    with Workers(produce, settings, trainer.step, "train", draw) as queue:
        trainer.train(queue)


if __name__ == "__main__":
    main()
