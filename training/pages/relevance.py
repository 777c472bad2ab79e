"""Trains the reading head of fovea-page: which tokens of a page help to answer a question.

    python -m pages.relevance --run runs/page --pages 1500

The model itself is not trained. The evidence of a question (`Turn.focus`: the answer, and the labels that
tell what it is) says which cells matter. The head is that of `fovea.relevance.reading`. It is written to
fovea/relevance.safetensors in the model's folder. The last lines tell for how many questions about held-out
pages all of the evidence is among the kept tokens, with the head and without it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fovea.engine.models.relevance_head import PATH as HEAD_PATH
from fovea.evaluation.documents.page import Page
from fovea.evaluation.scenes.sample import Turn
from fovea.relevance.balancing import Balancer, Ways
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import content_mask, keep_native
from fovea.relevance.reading import ROUNDS, SPAN, couple_by_reading, shapes
from fovea.relevance.realizing import Layout, View
from fovea.relevance.regions import filled
from fovea.relevance.texture import Map, Mask
from model import Fovea
from packing import Packer
from pages.asked import WHOLE, ask, seen
from pages.config import MODEL, PAGES, folder, tokenizer
from pages.crops import Store, cut
from pages.export import averaged
from pages.held_out import HELD
from pages.parts import answerable
from varied import CELL, gather_views

DEPTH = 96
SHARES = (0.5, 0.25, 0.1)
LARGEST = 1344 * 1344
"""Pixels of the largest page."""


@dataclass(frozen=True)
class Seen:
    """A page as the encoder sees it, with its questions.

    features: (rows, columns, D), 0 where nothing was encoded. held: where something was, (rows, columns).
    questions: for each its words, (Q, D), the cells of its evidence, (rows, columns), and itself.
    """

    survey: Survey
    features: NDArray[np.float16]
    held: Mask
    questions: list[tuple[NDArray[np.float32], Mask, Turn]]


class Head(nn.Module):
    """The networks of `fovea.relevance.reading`, with its names, for training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = {name: nn.Linear(shape[1], shape[0]) for name, shape in shapes(width, DEPTH).items()}
        for name in ("span", "key", "value", "image", "token", "score"):
            setattr(self, name, layers[name])
        self.mix = nn.ModuleList(layers[f"mix.{n}"] for n in range(ROUNDS))

    def forward(self, features: Tensor, held: Tensor, words: Tensor) -> Tensor:
        """Logits of the coupling of the held cells, (n,). The arguments are those of `couple_by_reading`."""
        padded = F.pad(_unit(words), (0, 0, 0, SPAN - 1))
        stretches = torch.cat([padded[n : n + len(words)] for n in range(SPAN)], dim=1)
        spans = F.relu(self.span(stretches))
        keys, values = self.key(spans), self.value(spans)
        image = self.image(_unit(features[held]))
        matches = image @ keys.T / keys.shape[1] ** 0.5
        found = matches.softmax(1) @ values
        tokens = F.relu(self.token(torch.cat((image, found, matches.amax(1, keepdim=True)), dim=1)))
        for mix in self.mix:
            states = torch.zeros((*held.shape, tokens.shape[1])).masked_scatter(held[..., None], tokens)
            tokens = tokens + F.relu(mix(_surroundings(states)[held]))
        return self.score(tokens)[:, 0]

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The parameters by name."""
        return {name: value.detach().numpy().copy() for name, value in self.named_parameters()}


def _unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().mean(1, keepdim=True) + 1e-6).sqrt()


def _surroundings(states: Tensor) -> Tensor:
    """States of a cell, its row before it, its column above it and its neighbours, as in the engine."""
    before, above = states.cummax(1).values, states.cummax(0).values
    near = F.max_pool2d(states.permute(2, 0, 1)[None], 3, 1, 1)[0].permute(1, 2, 0)
    return torch.cat((states, before, above, near), dim=2)


@torch.no_grad()
def look(model: Fovea, packer: Packer, rng: Random, page: Page, count: int) -> Seen | None:
    """Encode all regions of a page that have content, and ask `count` questions about it."""
    size = page.image.size[0] // CELL * CELL, page.image.size[1] // CELL * CELL
    if size[0] * size[1] > LARGEST:
        return None
    pixels = cut(rng, page, size, WHOLE)
    known = survey(np.ascontiguousarray(pixels), CELL)
    content = content_mask(known.propositional, known.perspectival)
    regions = filled(content)
    if not regions:
        return None
    grid = content.shape[0], content.shape[1]
    views = tuple(View(one, (one.rows, one.columns), tuple(range(one.tokens))) for one in regions)
    layout = Layout(grid, views)
    arrays = {name: torch.from_numpy(value) for name, value in gather_views([layout], [pixels]).items()}
    visual, _ = model.encode_views(arrays)
    features = np.zeros((*grid, visual.shape[1]), np.float16)
    held = np.zeros(grid, bool)
    rows, columns = layout.places().T
    features[rows, columns] = visual.float().numpy()
    held[rows, columns] = True
    embed = model.model["language_model"].embed_tokens.weight.detach()
    questions = []
    for turn in ask(rng, seen(page, WHOLE, size), count):
        focus = focus_cells(turn, grid)
        if focus.any():
            questions.append((embed[packer.text(turn.question)].numpy(), focus, turn))
    return Seen(known, features, held, questions) if questions else None


def focus_cells(turn: Turn, grid: tuple[int, int]) -> Mask:
    """The cells that hold a question's evidence: those on the middle line of its boxes."""
    cells = np.zeros(grid, bool)
    for left, top, right, bottom in turn.focus:
        row = int((top + bottom) / 2 // CELL)
        cells[row, int(left // CELL) : int(max(left, right - 1) // CELL) + 1] = True
    return cells


def look_at(model: Fovea, packer: Packer, place: Path, count: int, each: int, name: str) -> Iterator[Seen]:
    """Some pages of a folder, with `each` questions."""
    pages, made, tried = Store(place), 0, 0
    while made < count and tried < 3 * count:
        rng = Random(f"relevance/{name}/{tried}")
        tried += 1
        one = look(model, packer, rng, pages.page(rng), each)
        if one is not None:
            made += 1
            yield one


def loss_of(head: Head, one: Seen, words: NDArray[np.float32], focus: Mask) -> Tensor:
    """Cells of the evidence, and all others, count half each."""
    held = torch.from_numpy(one.held)
    logits = head(torch.from_numpy(one.features.astype(np.float32)), held, torch.from_numpy(words))
    target = torch.from_numpy(focus)[held]
    if not bool(target.any()):
        return logits.sum() * 0
    return F.softplus(-logits[target]).mean() + F.softplus(logits[~target]).mean()


def train(head: Head, examples: list[Seen], epochs: int, rate: float) -> None:
    flat = [(one, words, focus) for one in examples for words, focus, _ in one.questions]
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01)
    steps, step, running = epochs * (len(flat) // 16), 0, 0.0
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    for epoch in range(epochs):
        Random(epoch).shuffle(flat)
        for start in range(0, len(flat) - 15, 16):
            loss = torch.stack([loss_of(head, *one) for one in flat[start : start + 16]]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            running, step = 0.98 * running + 0.02 * float(loss.detach()), step + 1
            if step % 100 == 0:
                print(f"step {step} of {steps}: loss {running / (1 - 0.98**step):.3f}", flush=True)


def covered(weights: dict[str, NDArray[np.float32]] | None, examples: list[Seen], share: float) -> float:
    """For which part of the questions all evidence is kept. weights: None: key words stand for the head."""
    right = total = 0
    for one in examples:
        content = content_mask(one.survey.propositional, one.survey.perspectival)
        budget = max(1, round(content.size * share))
        for words, _, turn in one.questions:
            participatory: Map = one.survey.keyword_map(turn.question)
            if weights is not None:
                participatory = couple_by_reading(weights, one.features.astype(np.float32), one.held, words)
            ways = Ways(one.survey.propositional, one.survey.perspectival, participatory)
            tensions = Balancer().tensions(turn.question, None, one.survey.statistics(budget))
            layout = keep_native(Balancer().balance(ways, tensions), content, budget).layout
            right += answerable(turn, layout.native_cells())
            total += 1
    return right / max(1, total)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--run", default="runs/page")
    parser.add_argument("--pages", type=int, default=1500)
    parser.add_argument("--held", type=int, default=100)
    parser.add_argument("--each", type=int, default=10, help="questions about each page")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=MODEL)
    options = parser.parse_args()
    torch.manual_seed(0)
    made = tokenizer()
    model, packer = averaged(folder(options.run), made), Packer(made)
    started = time.time()
    examples = list(look_at(model, packer, PAGES, options.pages, options.each, "training"))
    print(f"{len(examples)} pages encoded in {time.time() - started:.0f} s", flush=True)
    head = Head(examples[0].features.shape[2])
    train(head, examples, options.epochs, options.rate)
    weights = head.arrays()
    (options.out / HEAD_PATH).parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, options.out / HEAD_PATH)
    held = list(
        look_at(model, packer, PAGES.with_name(f"{PAGES.name}-{HELD}"), options.held, options.each, "held")
    )
    for share in SHARES:
        print(f"{share}: all evidence kept for {covered(weights, held, share):.3f}, ", end="")
        print(f"by key words for {covered(None, held, share):.3f}")


if __name__ == "__main__":
    main()
