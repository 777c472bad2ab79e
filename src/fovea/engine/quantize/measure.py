"""Measures how much the loss on the calibration data depends on the outputs of each linear map.

The plain checkpoint is run forward and back, one layer at a time: the rows before each layer are kept in
files, and each layer is computed a second time for its gradients. With g the gradient of the loss (the sum of
all tokens' cross entropy) in an output row W x, a change D of the weight costs about 1/2 sum (g . D x)^2 over
the rows, divided by the number of tokens: the loss's second derivative is replaced by the products of its
gradients (the empirical Fisher matrix), row by row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fovea.engine.layers.decoder import build_layer
from fovea.engine.layers.linear import Linear
from fovea.engine.quantize.layers import Checkpoint, LayerRun, stages
from fovea.engine.quantize.record import Sample
from fovea.engine.quantize.schemes import Scheme, round_weight
from fovea.kernels.activation import finish

CHUNK = 256
"""Rows whose logits are in memory at a time."""
FOLDER, FILE = "measuring", "measured.json"
"""Folder in the output folder for rows, and its file of the result: a stopped run does not measure again."""
PROMPTS = 8
"""Prompts that are measured at most."""
LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a pass back.

    loss: mean cross entropy of the tokens that count, in nats.
    visual: for each layer, the mean absolute gradient of rows of images over that of rows of text; smaller
        ones are raised to the median of all layers, as MBQ (arXiv 2412.19509) does. 1 without images.
    costs: for each map by its path, and scheme by name: growth of the loss if the map is rounded to the
        nearest, in nats per token.
    """

    loss: float
    visual: tuple[float, ...]
    costs: Mapping[str, Mapping[str, float]]


def measure(
    source: Checkpoint,
    samples: Sequence[Sample],
    schemes: Sequence[Scheme],
    out: Path,
    advance: Callable[[], None],
) -> Measured:
    """Run the samples forward and back.

    At most PROMPTS prompts are used, from all places of the data.
    schemes: those whose costs are measured.
    out: the output folder; a folder in it holds rows between layers, and then the result.
    advance: called for each layer, once forward and once back.
    """
    folder = out / FOLDER
    key = repr((str(source.folder), [len(sample.x) for sample in samples], [*map(str, schemes)]))
    done = folder / FILE
    if done.is_file():
        found = json.loads(done.read_text())
        if found.pop("key") == key:
            return Measured(found["loss"], tuple(found["visual"]), found["costs"])
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(dict.fromkeys(sample.prompt for sample in samples))
    if len(numbers) > PROMPTS:  # questions and texts are in turn, so every second place is moved by one
        numbers = [numbers[at * len(numbers) // PROMPTS + at % 2] for at in range(PROMPTS)]
    used = [sample for sample in samples if sample.prompt in numbers]
    prompts = [list(group) for _, group in groupby(range(len(used)), lambda at: used[at].prompt)]
    count = len(source.model.decoder.layers)
    rows = [sample.x for sample in used]
    for number in range(count):
        torch.save(rows, _file(folder, number))
        with _layer(source, number) as layer, torch.no_grad():
            run = LayerRun(source.model, layer, number, used)
            rows = [run.forward(sample, x) for sample, x in zip(used, rows, strict=True)]
        advance()
    loss, gradients = _loss(source, used, rows)
    tokens = max(1, sum(int((sample.targets >= 0).sum()) for sample in used))
    ratios: list[float] = []
    costs: dict[str, dict[str, float]] = {}
    for number in reversed(range(count)):
        rows = torch.load(_file(folder, number))
        with _layer(source, number) as layer:
            ratios.insert(0, _ratio(used, gradients))
            run = LayerRun(source.model, layer, number, used)
            observer = _Observer(layer, f"decoder.layers.{number}", schemes)
            for places in prompts:  # later samples of a prompt read keys and values of earlier ones
                outputs = [run.forward(used[at], rows[at].requires_grad_()) for at in places]
                torch.autograd.backward(outputs, [gradients[at] for at in places])
                for at in places:
                    gradient = rows[at].grad
                    assert gradient is not None
                    gradients[at] = gradient
                run.forget()
            costs |= observer.costs(tokens)
        _file(folder, number).unlink()
        advance()
    middle = sorted(ratios)[len(ratios) // 2]
    result = Measured(loss / tokens, tuple(max(ratio, middle) for ratio in ratios), costs)
    done.write_text(json.dumps(asdict(result) | {"key": key}))
    return result


def _file(folder: Path, number: int) -> Path:
    return folder / f"rows-{number:05}.pt"


@contextmanager
def _layer(source: Checkpoint, number: int) -> Iterator[nn.Module]:
    """Load a decoder layer for as long as the context lasts."""
    layers = source.model.decoder.layers
    layer = layers[number] = build_layer(source.model.decoder.config, number)
    source.load(layer, f"decoder.layers.{number}")
    try:
        yield layer
    finally:
        layers[number] = layer.to("meta")
        source.stored.close()


def _loss(
    source: Checkpoint, samples: Sequence[Sample], rows: Sequence[Tensor]
) -> tuple[float, list[Tensor]]:
    """Return the sum of the cross entropies, and its gradients in the rows after the last layer."""
    model = source.model
    head, path = (
        (model.decoder.embed_tokens, "decoder.embed_tokens")
        if model.head.tied
        else (model.head.lm_head, "lm_head")
    )
    parts = [(model.decoder.norm, "decoder.norm"), (head, path)]
    for module, name in parts:
        module.to_empty(device="cpu")
        source.load(module, name)
    source.stored.close()
    weight, cap = head.weight.data, model.head.cap
    total, gradients = 0.0, []
    for sample, hidden in zip(samples, rows, strict=True):
        gradient = torch.zeros_like(hidden)
        for places in torch.split((sample.targets >= 0).nonzero()[:, 0], CHUNK):
            x = hidden[places].requires_grad_()
            logits = functional.linear(model.decoder.norm(x), weight)
            logits = torch.tanh(logits / cap) * cap if cap else logits
            loss = functional.cross_entropy(logits, sample.targets[places], reduction="sum")
            torch.autograd.backward(loss)
            assert x.grad is not None
            gradient[places] = x.grad
            total += float(loss.detach())
        gradients.append(gradient)
    for module, _ in parts:
        module.to("meta")
    return total, gradients


def _ratio(samples: Sequence[Sample], gradients: Sequence[Tensor]) -> float:
    """Return the mean absolute gradient of rows of images over that of rows of text; 1: one is missing."""
    sums = {True: 0.0, False: 0.0}
    counts = {True: 0, False: 0}
    for sample, gradient in zip(samples, gradients, strict=True):
        visual = sample.is_visual()
        if not bool(visual.any()):  # texts have other gradients than questions about images
            continue
        for kind, rows in ((True, gradient[visual]), (False, gradient[~visual])):
            sums[kind] += float(rows.abs().sum())
            counts[kind] += rows.numel()
    if not counts[True] or not sums[False]:
        return 1.0
    return (sums[True] / counts[True]) / (sums[False] / counts[False])


class _Observer:
    """Adds up what roundings of a layer's maps cost while gradients pass them."""

    def __init__(self, layer: nn.Module, prefix: str, schemes: Sequence[Scheme]) -> None:
        self._sums: dict[str, dict[str, Tensor]] = {}
        paths = {module: f"{prefix}.{path}" for path, module in layer.named_modules()}
        for each, _ in stages(layer):
            changes = {
                str(scheme): round_weight(each.weight.data, scheme).values() - each.weight.data
                for scheme in schemes
                if scheme.fits(each.in_features)
            }
            self._sums[paths[each]] = {name: torch.zeros(()) for name in changes}
            self._watch(each, changes, self._sums[paths[each]])

    def _watch(self, each: Linear, changes: Mapping[str, Tensor], sums: dict[str, Tensor]) -> None:
        def forward(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = functional.linear(x, each.weight, each.bias)
            inputs = x.detach()

            def note(gradient: Tensor) -> None:
                for name, change in changes.items():
                    moved = functional.linear(inputs, change)
                    sums[name] += (moved * gradient).sum(-1).square().sum()

            if y.requires_grad:
                y.register_hook(note)  # type: ignore[no-untyped-call]
            return finish(y, each.activation, each.gated, residual)

        each.forward = forward  # type: ignore[method-assign]

    def costs(self, tokens: int) -> dict[str, dict[str, float]]:
        return {
            path: {name: float(total) / (2 * tokens) for name, total in sums.items()}
            for path, sums in self._sums.items()
        }
