"""The loop that teaches fovea-page to answer: shared by `pages.letters` and `pages.train`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

from loop import Run, Schedule, tensors
from model import Fovea, Text, rotate
from packing import Batch, Packer
from pages import read
from pages.asked import line_batch, small_batch
from pages.config import PAGES, folder, tokenizer
from pages.crops import Store
from pages.heads import HALFWAY
from pages.held_out import HeldOut, exact, held_out_pages
from pages.spelling import Reading, Spelling
from pages.start import COPY_LAYERS, LABEL_LAYER, NAME_LAYER, POINT_LAYER, POINTERS, REGISTERS
from pages.state import CIRCLES, PLACE
from precision import autocast


@dataclass
class Settings(Schedule):
    """The command-line options of a run.

    run: folder of the run. pages: folders of stored pages, with commas between them.
    lines: tiny parts with few words in a step; 0: none.
    small: pixels of a step's parts of pages; 0: none. parts: pixels of the largest page of which a step shows
        some tokens; 0: none. whole: pixels of a step's whole pages; 0: none.
    largest: pixels of the largest whole page. asked: questions about each picture.
    dense: weight of what the tower reads. looking: weight of where heads look. knowing: of labels.
    eval_minutes: between evaluations.
    """

    run: str = "runs/page"
    pages: str = str(PAGES)
    warmup: int = 60
    rate: float = 2e-3
    adam_rate: float = 1.5e-3
    lines: int = 0
    small: int = 700_000
    parts: int = 0
    whole: int = 400_000
    largest: int = 900_000
    asked: int = 10
    dense: float = 0.3
    looking: float = 0.5
    knowing: float = 0.1
    average: float = 0.99
    eval_minutes: float = 10.0


Draw = Callable[[Random, Packer, Store, Any], list[Batch]]


def produce(
    queue: mp.Queue, settings: Settings, start: int, worker: int, name: str, draw: Draw, drawn: bool = True
) -> None:
    """Put the batches of each step into a queue: lines, small parts, and those of `draw`.

    name: of the training, a part of the seed. drawn: see `Store`.
    """
    os.nice(2)
    torch.set_num_threads(1)
    pages = Store(*(folder(one) for one in settings.pages.split(",")), drawn=drawn)
    packer = Packer(tokenizer())
    step = start + worker
    while True:
        rng = Random(f"{name}/{settings.seed}/{step}")
        if step % 400 < settings.workers:
            pages.refresh()
        batches = []
        if settings.lines:
            batches.append(line_batch(rng, packer, pages, settings.lines))
        if settings.small:
            batches.append(small_batch(rng, packer, pages, settings.small, settings.asked))
        queue.put([tensors(batch) for batch in (*batches, *draw(rng, packer, pages, settings))])
        step += settings.workers


def answer_losses(model: Reading, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean losses of the tokens of answers, and of heads that should look at a certain place."""
    visual, features = model.visual(batch)
    return text_losses(model, batch, visual, features)


def losses(model: Reading, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`answer_losses`, and those of what the tower reads."""
    visual, features = model.visual(batch)
    return text_losses(model, batch, visual, features) | read.losses(model.spelling, visual, batch)


def text_losses(
    model: Reading, batch: dict[str, Tensor], visual: Tensor, features: list[Tensor]
) -> dict[str, Tensor]:
    states = model.states(batch, visual, features)
    at_row, at_column, token, _ = batch["targets"].unbind(1)
    values = {"answer": F.cross_entropy(model.logits(states.last[at_row, at_column]), token)}
    text = model.model["language_model"]
    if len(batch.get("labels", ())):
        values["labels"] = label_loss(model.spelling, states.inputs[POINT_LAYER], batch["labels"])
    if len(batch.get("places", ())):
        values["places"] = place_loss(states.inputs, batch["places"])
    return values | {
        name: looking_loss(text, states.inputs, layer, batch, batch[name], alone=name == "points")
        for name, layer in LOOKING.items()
        if len(batch.get(name, ()))
    }


def label_loss(spelling: Spelling, states: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of what tokens know of labels before POINT_LAYER compares it.

    Without it, training gives up the language that labels are compared in before it is of use.

    labels: (n, 3 + LABEL_LETTERS): sequence, token, number of `start.KNOWN`, letters.
    """
    logits = spelling.label_logits(states[labels[:, 0], labels[:, 1]], labels[:, 2])
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 3:].flatten())


def place_loss(inputs: list[Tensor], places: Tensor) -> Tensor:
    """How far the places that tokens know are from the right ones: one minus the cosine.

    inputs: of each layer. places: (n, 4): sequence, token, number of `start.REGISTERS`, and the visual token
        whose place it should know.
    """
    losses = []
    for number, (layer, at) in enumerate(REGISTERS):
        row, state, _, token = places[places[:, 2] == number].unbind(1)
        known = inputs[layer][row, state, at : at + CIRCLES].float()
        right = inputs[layer][row, token, PLACE : PLACE + CIRCLES].float() - HALFWAY
        losses.append((1 - F.cosine_similarity(known, right)).sum())
    return torch.stack(losses).sum() / len(places)


def looking_loss(
    text: Text, inputs: list[Tensor], layer: int, batch: dict[str, Tensor], looks: Tensor, *, alone: bool
) -> Tensor:
    """Cross-entropy of where heads of a layer look.

    looks: (n, 4): sequence, token that looks, token to be looked at, head.
    alone: "head" is a number of POINTERS, and the other pointers should look at the first token, which tells
        nothing.
    """
    return torch.cat(looks_of(text, inputs, layer, batch, looks, alone=alone)).sum() / len(looks)


def looks_of(
    text: Text,
    inputs: list[Tensor],
    layer: int,
    batch: dict[str, Tensor],
    looks: Tensor,
    *,
    alone: bool = False,
) -> list[Tensor]:
    """`looking_loss` of each look, by sequence."""
    return [
        _looking(text, inputs[layer][row], layer, batch, row, looks[looks[:, 0] == row], alone=alone)
        for row in looks[:, 0].unique().tolist()
    ]


def _looking(
    text: Text, states: Tensor, layer: int, batch: dict[str, Tensor], row: int, looks: Tensor, *, alone: bool
) -> Tensor:
    """`looking_loss` of one sequence, for each of its looks. states: (L, hidden)."""
    block = text.layers[layer]
    attention = block.self_attn
    _, state, target, head = looks.unbind(1)
    prefix = int(batch["prefix"])
    end = len(states) if bool((state >= prefix).any()) else prefix
    cos, sin = (one[0, 0] for one in text.rope(batch["positions"][:, row : row + 1]))
    normed = block.input_layernorm(states)
    query = attention.q_proj(normed[state]).unflatten(-1, (attention.heads, -1))
    query = rotate(attention.q_norm(query), cos[state][:, None], sin[state][:, None]).float()
    key = attention.k_proj(normed[:end]).unflatten(-1, (attention.kv_heads, -1))
    key = rotate(attention.k_norm(key), cos[:end, None], sin[:end, None]).float()
    if alone:
        query, heads = query[:, POINTERS], torch.tensor(POINTERS, device=key.device)
        groups = heads.expand(len(looks), -1) // (attention.heads // attention.kv_heads)
    else:
        query = query[torch.arange(len(looks), device=key.device), head][:, None]
        groups = head[:, None] // (attention.heads // attention.kv_heads)
    each = torch.einsum("nhd,pgd->gnhp", query, key) * attention.size**-0.5
    scores = each.gather(0, groups[None, ..., None].expand(1, -1, -1, end))[0]
    segment, place = batch["segment"][row], torch.arange(end, device=key.device)
    seen = (segment[:end] == 0) | (segment[:end] == segment[state][:, None])
    seen &= place <= state[:, None]
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if not alone:
        return F.cross_entropy(scores[:, 0], target, reduction="none")
    mine = torch.arange(len(POINTERS), device=key.device) == head[:, None]
    wanted = torch.where(mine, target[:, None], 0)
    losses = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
    return (losses * torch.where(mine, 1.0, OTHERS / 3)).sum(1)


LOOKING = {"points": POINT_LAYER, "links": LABEL_LAYER, "asks": NAME_LAYER}
LOOKING |= {f"copies{number}": layer for number, layer in enumerate(COPY_LAYERS)}
"""The layers with heads that are told where to look: from the start of an answer to where it stands, from a
value to its label, from the start of an answer to what names the label in the question, and from a letter of
an answer to where the next one is read."""
COMPARED = 200
"""Steps until answers are told at full weight where they stand: labels must be known before they can be
compared, or the comparison is given up."""
OTHERS = 0.5
"""Weight of the pointers that should not look."""


class Trainer(Run):
    """The whole model, in training."""

    losses = staticmethod(losses)

    def __init__(self, settings: Settings, model: Fovea) -> None:
        self.packer = Packer(tokenizer())
        super().__init__(settings, folder(settings.run), model)

    def update(self, batches: list[dict[str, Tensor]]) -> None:
        """One step of the optimizer on several batches, each weighted by its number of answer tokens."""
        weights = [float(len(batch["targets"])) for batch in batches]
        self.forget_gradients()
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
            with autocast(self.device.type):
                values = self.losses(self.model, batch)
            factors = {"answer": 1.0, "labels": self.settings.knowing}
            factors |= dict.fromkeys((*LOOKING, "places"), self.settings.looking)
            factors["points"] *= min(1.0, self.step / COMPARED)
            total = sum(value * factors.get(name, self.settings.dense) for name, value in values.items())
            (total * (weight / sum(weights))).backward()
            for name, value in values.items():
                self.follow(name if len(batches) == 1 else f"{name} {number}", float(value.detach()))
            self.questions += len(batch["targets"][:, [0, 3]].unique(dim=0))
        self.apply()

    def evaluate(self, pages: list[HeldOut]) -> dict[str, float]:
        """The exact match of the averaged weights by kind. Afterwards the model has its own weights again."""
        originals = [p.detach().clone() for p in self.model.parameters()]
        self.model.eval()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.averages, strict=True):
                parameter.copy_(value)
            scores = exact(self.model, pages, self.device)
            for parameter, value in zip(self.model.parameters(), originals, strict=True):
                parameter.copy_(value)
        self.model.train()
        return scores

    def train(self, queue: mp.Queue) -> None:
        pages = held_out_pages(self.packer)
        next_eval, since, mark = 60 * self.settings.eval_minutes, time.time(), self.step
        while self.goes_on:
            self.update(queue.get())
            if not all(math.isfinite(value) for value in self.running.values()):
                raise RuntimeError(f"a loss is not finite: {self.running}")
            if self.step % 25 == 0:
                wall = (time.time() - since) / max(1, self.step - mark)
                self.log(factor=round(self.factor, 3), wall=round(wall, 2))
                since, mark = time.time(), self.step
            if self.step % 150 == 0:
                self.save()
            if self.clock.seconds > next_eval:
                next_eval = self.clock.seconds + 60 * self.settings.eval_minutes
                self.log(exact=self.evaluate(pages))
                self.save()
                since, mark = time.time(), self.step
        self.log(exact=self.evaluate(pages), end=True)
        self.save()
