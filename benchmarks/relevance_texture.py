"""Compare candidates for the 13th channel of fovea.relevance.texture, beside the other twelve.

    python benchmarks/relevance_texture.py [--images 150] [--cell 32] [--seed 13]

For every kind of question, twice `--images` held-out scenes are drawn. A score must separate the cells that
touch a box of the question's focus from the other cells of the image. The figure is the area under the ROC
curve within an image, averaged over images. It measures how well the place of the answer can be found, not
the accuracy of answers. There are two scores:

  salience      fovea.relevance.knowing.perspectival with the candidate as 13th channel (zero for `twelve`),
                evaluated on all images
  regression    logistic regression, one per kind of question, on each channel, its distance from the image's
                median, and the root of that distance; fitted on the first half of the images, evaluated on
                the second half

For every candidate the script prints the gain over the twelve channels, with the 95% interval of a bootstrap
over images. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fovea.evaluation.scenes import HELD_OUT_SEED, Turn, generate
from fovea.relevance.knowing import perspectival
from fovea.relevance.texture import CHANNELS, Texture, texture

Array = NDArray[np.float64]
KINDS = ("small_text", "small_object", "reading", "colour", "shape", "listing")
LARGE = ((896, 896), (1344, 896))
ORDINARY = ((448, 448), (640, 512))
RIDGE, STEPS = 1e-3, 12


@dataclass(frozen=True)
class Scene:
    """One image and question.

    pixels: (height, width, 3).
    texture: texture of the image.
    focus: (rows, columns), true for the cells that hold the answer.
    """

    pixels: NDArray[np.uint8]
    texture: Texture
    focus: NDArray[np.bool_]


def blocks(luma: NDArray[np.uint8], side: int) -> Array:
    """The squares of an image, (rows, columns, side * side), with values in [0, 1]."""
    rows, columns = luma.shape[0] // side, luma.shape[1] // side
    cut = luma.reshape(rows, side, columns, side).swapaxes(1, 2)
    return cut.reshape(rows, columns, side * side).astype(np.float64) / 255


def grey(scene: Scene) -> Array:
    return blocks(scene.texture.luma, scene.texture.cell)


def fine_deviation(scene: Scene) -> Array:
    """Standard deviation of luminance within squares of a quarter of the cell's side."""
    variance = blocks(scene.texture.luma, scene.texture.cell // 4).var(-1)
    rows, columns = scene.texture.grid
    return np.sqrt(variance.reshape(rows, 4, columns, 4).mean(axis=(1, 3)))


def entropy(scene: Scene) -> Array:
    """Entropy of each cell over 16 levels of luminance."""
    levels = (grey(scene) * 15.99).astype(int)
    share = np.stack([(levels == level).mean(-1) for level in range(16)])
    return -(share * np.log(np.maximum(share, 1e-9))).sum(0) / np.log(16)


def strongest_colour(scene: Scene) -> Array:
    """The largest difference between red, green and blue in any pixel of a cell."""
    saturation = scene.pixels.max(2) - scene.pixels.min(2)
    return blocks(saturation, scene.texture.cell).max(-1)


def steepest(scene: Scene) -> Array:
    """The largest step between neighbouring pixels in a cell."""
    luma = scene.texture.luma.astype(np.int16)
    down = np.abs(np.diff(luma, axis=0, append=luma[-1:]))
    across = np.abs(np.diff(luma, axis=1, append=luma[:, -1:]))
    return blocks(np.maximum(down, across).astype(np.uint8), scene.texture.cell).max(-1)


CANDIDATES: dict[str, Callable[[Scene], Array] | None] = {
    "twelve": None,
    "range": lambda scene: grey(scene).max(-1) - grey(scene).min(-1),
    "deviation": lambda scene: grey(scene).std(-1),
    "fine deviation": fine_deviation,
    "entropy": entropy,
    "darkest": lambda scene: grey(scene).min(-1),
    "steepest": steepest,
    "strongest colour": strongest_colour,
    "copy of lightness": lambda scene: scene.texture["lightness"].astype(np.float64),
    "copy of sobel": lambda scene: scene.texture["sobel"].astype(np.float64),
}


def focus_cells(turn: Turn, grid: tuple[int, int], cell: int) -> NDArray[np.bool_]:
    focus = np.zeros(grid, bool)
    for left, top, right, bottom in turn.focus:
        focus[int(top // cell) : int(-(-bottom // cell)), int(left // cell) : int(-(-right // cell))] = True
    return focus


def scenes(kind: str, count: int, cell: int, seed: int) -> list[Scene]:
    """Draw 2 * count scenes in which the focus of the question is a part of the image."""
    samples: list[Scene] = []
    sizes = LARGE if kind.startswith("small") else ORDINARY
    for sample in generate(seed, 10 * count, (kind,), sizes):
        pixels = np.asarray(sample.images[0].convert("RGB"))
        channels = texture(pixels, cell)
        focus = focus_cells(sample.turns[0], channels.grid, cell)
        if focus.any() and not focus.all():
            samples.append(Scene(pixels, channels, focus))
        if len(samples) == 2 * count:
            break
    return samples


def thirteenth_channel(scene: Scene, candidate: str) -> Array:
    """Values of the 13th channel, (rows, columns); zero for the twelve channels alone."""
    make = CANDIDATES[candidate]
    return np.zeros(scene.texture.grid) if make is None else make(scene)


def salience(images: list[Scene], candidate: str) -> list[Array]:
    scores = []
    for image in images:
        channels = image.texture.channels.copy()
        channels[:, :, CHANNELS.index("range")] = thirteenth_channel(image, candidate)
        scores.append(perspectival(replace(image.texture, channels=channels)).ravel())
    return scores


def features(scene: Scene, candidate: str) -> Array:
    """Input of the regression, (cells, features): channels, distances from the median, and their roots."""
    channels = scene.texture.channels.astype(np.float64)
    channels[:, :, CHANNELS.index("range")] = thirteenth_channel(scene, candidate)
    flat = channels.reshape(-1, len(CHANNELS))
    apart = np.abs(flat - np.median(flat, axis=0))
    return np.concatenate((flat, apart, np.sqrt(apart)), axis=1)


def fit_logistic(x: Array, y: NDArray[np.bool_]) -> Callable[[Array], Array]:
    """Fit a logistic regression by Newton's method, with equal weight of both classes. Returns its score."""
    mean, scale = x.mean(0), x.std(0) + 1e-9
    ones = np.ones((len(x), 1))
    x = np.concatenate(((x - mean) / scale, ones), axis=1)
    weight = np.where(y, 0.5 / y.mean(), 0.5 / (1 - y.mean())) / len(y)
    beta = np.zeros(x.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ beta, -30, 30)))
        gradient = x.T @ (weight * (p - y)) + RIDGE * beta
        curve = (x * (weight * p * (1 - p))[:, None]).T @ x + RIDGE * np.eye(len(beta))
        beta = beta - np.linalg.solve(curve, gradient)
    return lambda other: (other - mean) / scale @ beta[:-1]


def area(score: Array, focus: NDArray[np.bool_]) -> float:
    """The area under the ROC curve; ties count half."""
    _, inverse, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[inverse]
    inside = int(focus.sum())
    return float((rank[focus].sum() - inside * (inside + 1) / 2) / (inside * (focus.size - inside)))


def regression(images: list[Scene], candidate: str) -> list[Array]:
    """Scores of the second half of the images."""
    half = len(images) // 2
    inputs = [features(image, candidate) for image in images]
    score = fit_logistic(
        np.concatenate(inputs[:half]), np.concatenate([image.focus.ravel() for image in images[:half]])
    )
    return [score(values) for values in inputs[half:]]


def areas(
    score: Callable[[list[Scene], str], list[Array]], samples: dict[str, list[Scene]], name: str
) -> dict[str, Array]:
    by_kind = {}
    for kind, images in samples.items():
        scores = score(images, name)
        evaluated = images[len(images) - len(scores) :]
        by_kind[kind] = np.array([area(s, i.focus.ravel()) for s, i in zip(scores, evaluated, strict=True)])
    return by_kind


def interval(differences: Array, repeats: int = 2000) -> tuple[float, float]:
    indices = np.random.default_rng(0).integers(0, len(differences), (repeats, len(differences)))
    low, high = np.quantile(differences[indices].mean(1), (0.025, 0.975))
    return float(low), float(high)


def table(
    score: Callable[[list[Scene], str], list[Array]], samples: dict[str, list[Scene]]
) -> dict[str, dict[str, float]]:
    print(f"{score.__name__:<18}" + "".join(f"{kind:>13}" for kind in KINDS) + f"{'mean':>8}  gain (95%)")
    results: dict[str, dict[str, float]] = {}
    base = None
    for name in CANDIDATES:
        by_kind = areas(score, samples, name)
        every = np.concatenate(list(by_kind.values()))
        base = every if base is None else base
        gain, (low, high) = (every - base).mean(), interval(every - base)
        results[name] = {kind: float(values.mean()) for kind, values in by_kind.items()}
        results[name] |= {"mean": float(every.mean()), "gain": float(gain), "low": low, "high": high}
        cells = "".join(f"{100 * by_kind[kind].mean():13.2f}" for kind in KINDS)
        print(
            f"{name:<18}{cells}{100 * every.mean():8.2f}  "
            f"{100 * gain:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--cell", type=int, default=32)
    parser.add_argument("--seed", type=int, default=13, help="added to the first held-out seed")
    args = parser.parse_args()
    samples = {kind: scenes(kind, args.images, args.cell, HELD_OUT_SEED + args.seed) for kind in KINDS}
    print(f"{2 * args.images} images of each kind, cells of {args.cell} pixels; area under the ROC curve, %")
    results = {score.__name__: table(score, samples) for score in (salience, regression)}
    print(json.dumps({"images": args.images, "cell": args.cell, "seed": args.seed, "areas": results}))


if __name__ == "__main__":
    main()
