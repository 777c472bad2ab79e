"""Trains the networks of `fovea.relevance` for a model: the coupling of question and image, and the balance.

    python relevance.py [--samples 6000] [--epochs 6] [--out ../src/fovea/assets/fovea-tiny]

The model itself is not trained. A scene tells where the answer is (`Turn.focus`), so that each cell either
helps or does not.

- The coupling is trained to predict that directly.
- The balance is trained by the cells that a budget would keep. Choosing cells has no gradient, so a soft gate
    stands for it. The gate is open for cells that are more relevant than the last one that fits the budget.
    Each cell of the focus that the gate closes adds to the loss.
- The share of the budget for the view of the whole is trained by the model's answers. The loss of the right
    answer is measured for several shares, and the expected loss of a soft choice among them, around the
    tension, is minimised.

It writes fovea/relevance.safetensors, and prints the accuracy with and without each part.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from batches import fit_image, questions
from common import ASSETS
from fovea.engine.models.weights import PATH as HEAD_PATH
from fovea.evaluation.scenes.compose import compose, random_size
from fovea.evaluation.scenes.draw import draw
from fovea.evaluation.scenes.scene import HELD_OUT_SEED, Scene, Turn
from fovea.evaluation.scenes.small import LARGE_SIZES, compose_small
from fovea.relevance import knowing
from fovea.relevance.balancing import SPREAD, WEIGHTS, Balancer, Tensions, Ways, remoteness
from fovea.relevance.pipeline import Survey, survey
from fovea.relevance.policy import attend, content_mask, first_view
from fovea.relevance.realizing import View, patch_fractions, whole
from fovea.relevance.texture import Map
from model import Fovea
from packing import Packer, PromptMedia, collate, conversation
from varied import CELL, MERGE, gather_views, view_pixels

SPACE, HIDDEN = 48, 48
SHARES = (0.1, 0.25, 0.5)
GATE = 0.05
"""Width of the soft gate, in units of relevance."""
DIVISIONS = (0.05, 0.3, 0.6, 0.95)
"""Values of the compress tension for which the loss of the right answer is measured."""
CHOICE = 0.15
"""Width of the soft choice among DIVISIONS."""
MOST_NATS = 2.0
"""Losses are clipped to this."""


@dataclass(frozen=True)
class Example:
    """One question about one image, with the model's representation of both, and the place of the answer.

    survey: of the image.
    total: budget in tokens.
    shape: rows and columns of the view of the whole.
    features: the encoder's tokens of that view, (n, D).
    words: the decoder's embeddings of the question, (Q, D).
    focus: 1 for cells that contain a part of the answer, else 0; (rows, columns).
    turn: the question with its answer.
    pixels: of the image, (height, width, 3).
    """

    survey: Survey
    total: int
    shape: tuple[int, int]
    features: np.ndarray
    words: np.ndarray
    focus: Map
    turn: Turn
    pixels: np.ndarray


class Head(nn.Module):
    """The networks, with the parameter names that `coupling.couple` and `Balancer` read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.words = nn.Linear(width, SPACE), nn.Linear(width, SPACE)
        self.query, self.hidden = nn.Linear(SPACE, SPACE), nn.Linear(3 * SPACE, HIDDEN)
        self.coupling = nn.Linear(HIDDEN, 1)
        self.raw = nn.ModuleList((nn.Linear(3, 64), nn.Linear(64, 1)))
        self.context = nn.ModuleList((nn.Linear(width + 10, 64), nn.Linear(64, 3)))

    def couple(self, features: Tensor, words: Tensor) -> Tensor:
        """Logits of the coupling of each token, (n,)."""
        image = self.image(features)
        query = self.query(F.relu(self.words(words)).mean(0))
        both = torch.cat((image, query.expand_as(image), image * query), dim=1)
        return self.coupling(F.relu(self.hidden(both)))[:, 0]

    def tensions(self, example: Example, words: Tensor) -> Tensor:
        """The three tensions, (3,) in [0, 1]."""
        image = torch.from_numpy(example.survey.statistics(example.total))
        context = torch.cat((words.mean(0), image))
        return torch.sigmoid(self.context[1](F.relu(self.context[0](context))))

    def relevance(self, example: Example, participatory: Tensor, words: Tensor) -> Tensor:
        """Relevance of every cell before it is scaled to [0, 1], (rows, columns)."""
        known = torch.from_numpy(np.stack((example.survey.propositional, example.survey.perspectival)))
        maps = torch.stack((known[0].float(), known[1].float(), participatory))
        raw = torch.sigmoid(self.raw[1](F.relu(self.raw[0](maps.permute(1, 2, 0))))[..., 0])
        tensions = self.tensions(example, words)
        remote = torch.from_numpy(remoteness(raw.detach().numpy()))
        first = tensions[0] * maps[0] + (1 - tensions[0]) * maps[2]
        second = tensions[1] * maps[1] + (1 - tensions[1]) * (1 - maps[1])
        third = raw + (1 - tensions[2]) * SPREAD * remote
        return WEIGHTS[0] * first + WEIGHTS[1] * second + WEIGHTS[2] * third


def scene_of(rng: Random) -> tuple[Scene, tuple[int, int]]:
    """A random scene, and the size (width, height) to draw it at, in multiples of CELL."""
    if rng.random() < 0.5:
        size = rng.choice(LARGE_SIZES)
        return compose_small(rng, *size), size
    width, height = random_size(rng)
    scene = compose(rng, width, height, labels=rng.choice((0, 0, 1, 1, 2)))
    return scene, (max(64, round(width / CELL) * CELL), max(64, round(height / CELL) * CELL))


def focus_map(turn: Turn, scene: Scene, grid: tuple[int, int]) -> Map:
    """1 for cells that contain a part of the answer, else 0; (rows, columns)."""
    focus = np.zeros(grid, np.float32)
    sy, sx = grid[0] / scene.height, grid[1] / scene.width
    for left, top, right, bottom in turn.focus:
        down = slice(max(0, math.floor(top * sy)), max(1, math.ceil(bottom * sy)))
        across = slice(max(0, math.floor(left * sx)), max(1, math.ceil(right * sx)))
        focus[down, across] = 1
    return focus


@torch.no_grad()
def examples(model: Fovea, packer: Packer, seed: str, count: int) -> Iterator[Example]:
    """`count` questions, mostly several about one image."""
    number, index = 0, 0
    while number < count:
        index += 1
        rng = Random(f"{seed}/{index}")
        scene, size = scene_of(rng)
        turns = [turn for turn in questions(rng, scene, 3) if turn.focus]
        if not turns:
            continue
        pixels = fit_image(draw(scene), size)
        image_survey = survey(np.ascontiguousarray(pixels), CELL)
        grid = image_survey.grid
        cells = grid[0] * grid[1]
        total = max(
            2, min(cells - 1, math.ceil(cells * math.exp(rng.uniform(math.log(0.12), math.log(0.75)))))
        )
        shape = first_view(grid, total, rng.random())
        view = View(whole(*grid), shape, ())
        at = torch.from_numpy(patch_fractions(view, grid, MERGE))[None]
        visual, _ = model.model["visual"](torch.from_numpy(view_pixels(pixels, view).copy())[None], at)
        for turn in turns:
            words = model.model["language_model"].embed_tokens(torch.tensor(packer.text(turn.question)))
            number += 1
            yield Example(
                image_survey, total, shape, visual[0].float().numpy(), words.float().numpy(),
                focus_map(turn, scene, grid), turn, pixels,
            )  # fmt: skip


def pooled_focus(example: Example) -> Tensor:
    """The focus at the shape of the view that the coupling reads, by the highest cell of each token."""
    table = torch.from_numpy(example.focus)[None, None]
    return F.adaptive_max_pool2d(table, example.shape)[0, 0].flatten()


def loss_of(head: Head, example: Example, rng: Random) -> Tensor:
    """The loss of the coupling, and of the soft gate at a random budget."""
    features = torch.from_numpy(knowing.normalize(example.features)).float()
    words = torch.from_numpy(knowing.normalize(example.words)).float()
    logits = head.couple(features, words)
    target = pooled_focus(example)
    weight = torch.where(target > 0, (len(target) / target.sum().clamp(min=1)).sqrt(), torch.tensor(1.0))
    coupled = F.binary_cross_entropy_with_logits(logits, target, weight)
    grid = example.focus.shape
    known = torch.sigmoid(logits).view(1, 1, *example.shape)
    known = F.interpolate(known, grid, mode="bilinear", align_corners=False)[0, 0]
    relevance = head.relevance(example, known, words)
    low, high = relevance.min().detach(), relevance.max().detach()
    relevance = (relevance - low) / (high - low).clamp(min=1e-6)
    budget = max(1, round(relevance.numel() * math.exp(rng.uniform(math.log(0.05), math.log(0.5)))))
    line = relevance.detach().flatten().kthvalue(relevance.numel() - budget + 1).values
    focus = torch.from_numpy(example.focus) > 0
    gate = F.logsigmoid((relevance - line) / GATE)[focus]
    return coupled - 0.3 * gate.mean()


def train(head: Head, some: list[Example], epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), rate, weight_decay=0.01)
    steps, batch = epochs * len(some) // 16, 16
    rng = Random(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        losses = [loss_of(head, rng.choice(some), rng) for _ in range(batch)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step} of {steps}: loss {float(loss.detach()):.3f}", flush=True)


def arrays(head: Head) -> dict[str, np.ndarray]:
    """The parameters of the networks, by name."""
    return {name: value.detach().numpy().astype(np.float32) for name, value in head.state_dict().items()}


def relevance_of(weights: dict[str, np.ndarray], example: Example, tensions: Tensions) -> Map:
    """Relevance of every cell, like the engine computes it."""
    image_survey = example.survey
    coupled = knowing.resample(
        knowing.couple(weights, example.features, example.words), example.shape, image_survey.grid
    )
    ways = Ways(image_survey.propositional, image_survey.perspectival, coupled)
    return Balancer(weights).balance(ways, tensions)


@torch.no_grad()
def answer_losses(model: Fovea, packer: Packer, weights: dict[str, np.ndarray], example: Example) -> Tensor:
    """Mean loss of the right answer for each of DIVISIONS, in nats per token, (divisions,)."""
    pooled = knowing.normalize(example.words).mean(0)
    tensions = Balancer(weights).tensions("", pooled, example.survey.statistics(example.total))
    relevance = relevance_of(weights, example, tensions)
    content = content_mask(example.survey.propositional, example.survey.perspectival)
    layouts = [attend(relevance, content, example.total, compress).layout for compress in DIVISIONS]
    sequences = []
    for layout in layouts:
        media = PromptMedia(layout.grid, places=tuple(map(tuple, layout.places().tolist())))
        sequences.append(conversation(packer, [example.turn], media, None, False))
    batch = collate(sequences, [[] for _ in sequences]) | gather_views(
        layouts, [example.pixels] * len(layouts)
    )
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items()}
    with torch.autocast("cpu", torch.bfloat16):
        states, _, _ = model.hidden(tensors)
        row, column, token, _ = tensors["targets"].unbind(1)
        nats = F.cross_entropy(model.logits(states[row, column]), token, reduction="none")
    return torch.stack([nats[row == number].mean() for number in range(len(layouts))])


def expected_nats(compress: Tensor, nats: Tensor) -> Tensor:
    """Expected loss of a soft choice among DIVISIONS around `compress`. nats: loss of each."""
    apart = torch.tensor(DIVISIONS) - compress
    return (torch.softmax(-apart.square() / (2 * CHOICE**2), 0) * nats.clamp(max=MOST_NATS)).sum()


def train_division(head: Head, some: list[Example], nats: list[Tensor], epochs: int, rate: float) -> None:
    """Train the first tension alone; a change of the other tensions adds to the loss."""
    optimizer = torch.optim.AdamW(head.context.parameters(), rate, weight_decay=0.02)
    words = [torch.from_numpy(knowing.normalize(example.words)).float() for example in some]
    with torch.no_grad():
        before = [head.tensions(example, known)[1:] for example, known in zip(some, words, strict=True)]
    rng = Random(2)
    steps = epochs * len(some) // 32
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        losses = []
        for number in rng.choices(range(len(some)), k=32):
            tensions = head.tensions(some[number], words[number])
            change = (tensions[1:] - before[number]).square().sum()
            losses.append(expected_nats(tensions[0], nats[number]) + change)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def division_report(
    weights: dict[str, np.ndarray], some: list[Example], nats: list[Tensor]
) -> dict[str, float]:
    """Mean loss of held-out answers, by the way in which the first tension is chosen.

    The ways are: learned, by the prior, fixed at each of DIVISIONS, and the best of these for each question.
    """
    losses: dict[str, list[float]] = {}
    for example, row in zip(some, nats, strict=True):
        image = example.survey.statistics(example.total)
        pooled = knowing.normalize(example.words).mean(0)
        learned = Balancer(weights).tensions("", pooled, image).compress
        prior = Balancer().tensions(example.turn.question, None, image).compress
        clipped = row.clamp(max=MOST_NATS)
        for name, compress in (("learned", learned), ("prior", prior)):
            nearest = min(range(len(DIVISIONS)), key=lambda n: abs(DIVISIONS[n] - compress))
            losses.setdefault(name, []).append(float(clipped[nearest]))
        for number, compress in enumerate(DIVISIONS):
            losses.setdefault(f"fixed {compress:g}", []).append(float(clipped[number]))
        losses.setdefault("best of these", []).append(float(clipped.min()))
    return {name: round(float(np.mean(values)), 4) for name, values in losses.items()}


def focus_coverage(relevance: Map, example: Example, share: float) -> float:
    """The part of the focus that a layout with `share` of the tokens keeps at native resolution."""
    cells = relevance.size
    image_survey = example.survey
    content = content_mask(image_survey.propositional, image_survey.perspectival)
    total = max(1, min(cells - 1, math.ceil(cells * share)))
    layout = attend(relevance, content, total, 0.1).layout
    return float(layout.native_cells()[example.focus > 0].mean())


def report(weights: dict[str, np.ndarray], some: list[Example]) -> dict[str, dict[str, float]]:
    """Mean focus coverage of held-out questions about large images, by variant and share of the tokens.

    The variants are everything that was learned, and the same without each part.
    """
    table: dict[str, dict[str, list[float]]] = {}
    learned, prior = Balancer(weights), Balancer()
    for example in some:
        if example.focus.size < 512:
            continue
        image_survey = example.survey
        nothing = np.zeros(image_survey.grid, np.float32)
        coupled = knowing.resample(
            knowing.couple(weights, example.features, example.words), example.shape, image_survey.grid
        )
        image = image_survey.statistics(example.total)
        tensions = learned.tensions("", knowing.normalize(example.words).mean(0), image)
        question = example.turn.question
        guessed = prior.tensions(question, None, image)
        full = Ways(image_survey.propositional, image_survey.perspectival, coupled)
        without = partial(replace, full)
        variants = {
            "all of it": learned.balance(full, tensions),
            "fixed tensions": learned.balance(full, Tensions(0.5, 1.0, 1.0)),
            "priors, learned coupling": prior.balance(full, guessed),
            "priors, words alone": prior.balance(
                without(participatory=image_survey.keyword_map(question)), guessed
            ),
            "no participatory": prior.balance(without(participatory=nothing), guessed),
            "no perspectival": learned.balance(without(perspectival=nothing), tensions),
            "no propositional": learned.balance(without(propositional=nothing), tensions),
            "coupling alone": coupled,
            "propositional alone": full.propositional,
            "perspectival alone": full.perspectival,
        }
        for name, relevance in variants.items():
            for share in SHARES:
                row = table.setdefault(name, {})
                row.setdefault(f"{share:g}", []).append(focus_coverage(relevance, example, share))
    return {
        name: {share: round(float(np.mean(values)), 4) for share, values in row.items()}
        for name, row in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=600)
    parser.add_argument("--answers", type=int, default=1500, help="samples whose answers are scored, too")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ASSETS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = Fovea(json.loads((options.out / "config.json").read_text())).eval()
    weights = {name: value.float() for name, value in load_file(options.out / "model.safetensors").items()}
    model.load_state_dict(weights, strict=False)
    packer = Packer(str(options.out / "tokenizer.json"))
    started = time.time()
    some = list(examples(model, packer, "relevance", options.samples))
    tests = list(examples(model, packer, f"{HELD_OUT_SEED}/relevance", options.held_out))
    print(f"{len(some)} examples in {time.time() - started:.0f} s", flush=True)
    head = Head(some[0].features.shape[1])
    train(head, some, options.epochs, options.rate)
    started = time.time()
    samples, test_samples = some[: options.answers], tests[: options.answers]
    nats = [answer_losses(model, packer, arrays(head), example) for example in samples]
    test_nats = [answer_losses(model, packer, arrays(head), example) for example in test_samples]
    print(f"{len(nats) + len(test_nats)} answers scored in {time.time() - started:.0f} s", flush=True)
    train_division(head, samples, nats, 30, options.rate)
    division = division_report(arrays(head), test_samples, test_nats)
    for name, value in division.items():
        print(f"{name:28}{value:8.4f} nats")
    coverage = report(arrays(head), tests)
    for name, row in coverage.items():
        print(f"{name:28}" + "".join(f"{row[f'{share:g}']:8.3f}" for share in SHARES))
    parameters = arrays(head)
    if (
        division["learned"] > division["prior"]
        or coverage["all of it"]["0.25"] < coverage["priors, learned coupling"]["0.25"]
    ):
        print("the priors balance better than the learned networks: only the coupling is kept")
        parameters = {
            name: value for name, value in parameters.items() if not name.startswith(("raw.", "context."))
        }
    path = options.out / HEAD_PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(parameters, path)
    print(
        json.dumps(
            {
                "nats": division,
                "kept of the focus": coverage,
                "parameters": sum(p.numel() for p in head.parameters()),
            }
        )
    )


if __name__ == "__main__":
    main()
