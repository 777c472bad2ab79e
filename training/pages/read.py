"""Teaches the vision tower to read: the text from each patch on, in parts of pages. No questions yet.

    python -m pages.read --run runs/page --minutes 60
    python -m pages.read --run runs/page --minutes 60 --resume

    python -m pages.read --run runs/page --minutes 0 --begun    # only unpack the tower in the repository
    python -m pages.read --run runs/page --minutes 0 --resume --keep    # pack it again

`pages.join` gives the tower text layers.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

from loop import Run, Schedule, Workers, options, tensors
from model import Fovea, patches
from pages.config import PAGES, folder
from pages.crops import Store, cut, fullest
from pages.glyphs import PATCH, dense, glyphs
from pages.kept import TOWER, begin, keep
from pages.spelling import Reading, Spelling
from pages.tower_start import look_around
from precision import autocast
from train import dense_loss

SIZES = ((128, 512), (192, 384), (256, 256), (256, 384), (320, 320), (160, 640), (384, 256), (448, 448))
"""Width and height of the pictures, in either order."""
PARTS = 3
CLEAN = 1000
"""Steps until as many pictures are worn as in later trainings."""
NOISE = 0.02
"""Variance below which a direction counts as noise, as a share of the mean."""
LONGEST = 84
"""Patches along the side of the largest page."""


@dataclass
class Settings(Schedule):
    """The command-line options of a run.

    run: folder of the run. pages: folders of stored pages, with commas between them.
    area: pixels of a step's pictures.
    begun: begin with the tower in the repository. keep: write the averaged weights there at the end.
    """

    run: str = "runs/page"
    pages: str = str(PAGES)
    area: int = 1_000_000
    begun: bool = False
    keep: bool = False


def batch(
    rng: Random, pages: Store, size: tuple[int, int], count: int, wear: float = 0.5
) -> dict[str, np.ndarray]:
    """`count` pictures of one size with their dense targets. wear: see `cut`."""
    pictures, targets = [], []
    while len(pictures) < count:
        page = pages.page(rng)
        if not page.words:
            continue
        characters = glyphs(page.words)
        for _ in range(PARTS):  # several of each page: decoding its picture costs most
            affine = fullest(rng, page, size, characters.points)
            pictures.append(cut(rng, page, size, affine, wear))
            targets.append(dense(characters, affine, size))
    made = {"images": np.stack(pictures)}
    if rng.random() < 0.5:
        made["at"] = np.stack([window(rng, size) for _ in pictures])
    return made | {name: np.concatenate([one[name] for one in targets]) for name in targets[0]}


def window(rng: Random, size: tuple[int, int]) -> np.ndarray:
    """Positions of the patches of a picture that is a random part of a page, as `Vision.positions` takes
    them: what is written must be read everywhere on the page alike."""
    lines = []
    for length in (size[1] // PATCH, size[0] // PATCH):
        whole = rng.randint(length, max(length, LONGEST))
        start = rng.randint(0, whole - length)
        lines.append((start + np.arange(length, dtype=np.float32)) / (whole - 1))
    table = np.stack(np.meshgrid(*lines, indexing="ij"), axis=-1)
    rows, columns = len(lines[0]) // 2, len(lines[1]) // 2
    return table.reshape(rows, 2, columns, 2, 2).swapaxes(1, 2).reshape(-1, 2)


def produce(queue: mp.Queue, settings: Settings, start: int, worker: int) -> None:
    os.nice(3)
    torch.set_num_threads(1)
    pages = Store(*(folder(name) for name in settings.pages.split(",")))
    step = start + worker
    while True:
        rng = Random(f"read/{settings.seed}/{step}")
        if step % 400 < settings.workers:
            pages.refresh()
        size = rng.choice(SIZES)
        if rng.random() < 0.3:
            size = size[::-1]
        wear = 0.5 * min(1.0, step / CLEAN)
        made = batch(rng, pages, size, max(PARTS, settings.area // (size[0] * size[1])), wear)
        queue.put(tensors(made))
        step += settings.workers


def losses(spelling: Spelling, visual: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """How far visual tokens, (n, hidden), are from those that `spelling` makes of what is written."""
    text, flag = spelling.logits(visual)
    target = batch["text"]
    first = dense_loss(text[:, :, 0], target[..., 0], 0.15)
    rest = F.cross_entropy(text[:, :, 1:].flatten(0, 2), target[..., 1:].flatten(), ignore_index=-1)
    silence = spelling.silence(visual)
    return {"first": first, "rest": rest, "flag": dense_loss(flag, batch["flag"], 0.3), "silence": silence}


def accuracy(spelling: Spelling, visual: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The share of first characters, of all characters, and of whole stretches that are right."""
    text = spelling.logits(visual)[0].argmax(-1)
    target = batch["text"]
    some = target[..., 0] > 0
    right = text == target
    known = target >= 0
    return {
        "char": right[..., 0][some].float().mean(),
        "all": right[some][known[some]].float().mean(),
        "stretch": (right | ~known)[some].all(-1).float().mean(),
    }


@torch.no_grad()
def whiten(model: Fovea, pages: Store) -> None:
    """Let the first layer begin with what differs between the patches of pages, all directions alike.

    Most of a page is white: a random first layer would pass on little else.
    """
    rng = Random("whiten")
    batches = [batch(rng, pages, rng.choice(SIZES), 2 * PARTS)["images"] for _ in range(40)]
    grey = torch.cat(
        [patches(torch.from_numpy(one)).unflatten(-1, (3, -1)).mean(-2).flatten(0, -2) for one in batches]
    )
    centre = grey.mean(0)
    values, directions = torch.linalg.eigh((grey - centre).T @ (grey - centre) / len(grey))
    weight = directions.T / (values + NOISE * values.mean()).sqrt()[:, None]
    embed = model.model["visual"].patch_embed.proj
    embed.weight.copy_(
        (weight / 6).view(-1, 1, 1, PATCH, PATCH).expand_as(embed.weight)
    )  # 3 colours, 2 frames
    embed.bias.copy_(-weight @ centre)


class Reader(Run):
    """The vision tower, in training."""

    model: Reading

    name = "read"

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        model = Reading()
        # Nothing is known of DeepStack's features yet. The first layer stays as `whiten` makes it: a step of
        # Adam, equal for all weights, changes what it makes of white more than the text differs from that.
        for name, parameter in model.named_parameters():
            fixed = any(part in name for part in ("language_model", "deepstack", "patch_embed"))
            parameter.requires_grad_(not fixed)
        if settings.begun:
            begin(model, TOWER)
        elif not settings.resume:
            look_around(model)
            whiten(model, Store(*(folder(name) for name in settings.pages.split(","))))
        super().__init__(settings, folder(settings.run), model)

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Flat visual tokens of the pictures."""
        visual, _ = self.model.model["visual"](batch["images"], batch.get("at"))
        return visual.flatten(0, 1)

    def update(self, batch: dict[str, Tensor]) -> None:
        """One step of the optimizer."""
        batch = {name: value.to(self.device) for name, value in batch.items()}
        self.forget_gradients()
        with autocast(self.device.type):
            visual = self.encode(batch)
            values = losses(self.model.spelling, visual, batch)
        torch.stack(list(values.values())).sum().backward()
        for name, value in values.items():
            self.follow(name, float(value.detach()))
        if self.step % 10 == 0:
            with torch.no_grad(), autocast(self.device.type):
                for name, value in accuracy(self.model.spelling, visual, batch).items():
                    self.follow(name, float(value), 0.2)
        self.apply()

    def train(self, queue: mp.Queue) -> None:
        since = time.time()
        while self.goes_on:
            self.update(queue.get())
            if self.step % 50 == 0:
                self.log(factor=round(self.factor, 3), wall=round((time.time() - since) / 50, 2))
                since = time.time()
            if self.step % 250 == 0:
                self.save()
        self.log(end=True)
        self.save()


def main() -> None:
    settings = options(__doc__, Settings)
    reader = Reader(settings)
    with Workers(produce, settings, reader.step) as queue:
        reader.train(queue)
    if settings.keep:
        keep(reader, TOWER)


if __name__ == "__main__":
    main()
