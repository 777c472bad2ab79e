"""Which 13th channel earns its place beside the other twelve of fovea.relevance.texture.

    python benchmarks/relevance_texture.py [--images 150] [--cell 32] [--seed 13]

For every kind of question held-out scenes are drawn, twice `--images` of them. A cell is to be told from the rest of its image
if it touches a box of the question's focus; the figure is the area under the ROC curve within an image, its mean over images.
Two scores: `salience` is fovea.relevance.knowing.perspectival with the candidate in place of the 13th channel, and zero for
the twelve, judged on all images; `regression` is a logistic one, per kind, on each channel, its distance from the image's
median and the root of that, fitted on the first half of the images and judged on the second. For every candidate the
difference to the twelve, with the 95% interval of a bootstrap over images. Separability of where the answer is, not accuracy of
answers. The last line is JSON.
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
class Seen:
    """One image and question: its texture, and which cells the answer is in."""

    pixels: NDArray[np.uint8]
    texture: Texture
    focus: NDArray[np.bool_]


def blocks(luma: NDArray[np.uint8], side: int) -> Array:
    """(rows, columns, side * side) of [0, 1]."""
    rows, columns = luma.shape[0] // side, luma.shape[1] // side
    cut = luma.reshape(rows, side, columns, side).swapaxes(1, 2)
    return cut.reshape(rows, columns, side * side).astype(np.float64) / 255


def grey(seen: Seen) -> Array:
    return blocks(seen.texture.luma, seen.texture.cell)


def fine_deviation(seen: Seen) -> Array:
    """Within squares of a quarter of the cell's side."""
    variance = blocks(seen.texture.luma, seen.texture.cell // 4).var(-1)
    rows, columns = seen.texture.grid
    return np.sqrt(variance.reshape(rows, 4, columns, 4).mean(axis=(1, 3)))


def entropy(seen: Seen) -> Array:
    """Of 16 levels of luminance."""
    levels = (grey(seen) * 15.99).astype(int)
    share = np.stack([(levels == level).mean(-1) for level in range(16)])
    return -(share * np.log(np.maximum(share, 1e-9))).sum(0) / np.log(16)


def strongest_colour(seen: Seen) -> Array:
    """Of its pixels: the largest difference between red, green and blue."""
    saturation = seen.pixels.max(2) - seen.pixels.min(2)
    return blocks(saturation, seen.texture.cell).max(-1)


def steepest(seen: Seen) -> Array:
    """The largest step between neighbouring pixels in a cell."""
    luma = seen.texture.luma.astype(np.int16)
    down = np.abs(np.diff(luma, axis=0, append=luma[-1:]))
    across = np.abs(np.diff(luma, axis=1, append=luma[:, -1:]))
    return blocks(np.maximum(down, across).astype(np.uint8), seen.texture.cell).max(-1)


CANDIDATES: dict[str, Callable[[Seen], Array] | None] = {
    "twelve": None,
    "range": lambda seen: grey(seen).max(-1) - grey(seen).min(-1),
    "deviation": lambda seen: grey(seen).std(-1),
    "fine deviation": fine_deviation,
    "entropy": entropy,
    "darkest": lambda seen: grey(seen).min(-1),
    "steepest": steepest,
    "strongest colour": strongest_colour,
    "copy of lightness": lambda seen: seen.texture["lightness"].astype(np.float64),
    "copy of sobel": lambda seen: seen.texture["sobel"].astype(np.float64),
}


def touched(turn: Turn, grid: tuple[int, int], cell: int) -> NDArray[np.bool_]:
    found = np.zeros(grid, bool)
    for left, top, right, bottom in turn.focus:
        found[int(top // cell) : int(-(-bottom // cell)), int(left // cell) : int(-(-right // cell))] = True
    return found


def looked_at(kind: str, count: int, cell: int, seed: int) -> list[Seen]:
    """2 * count images whose question has a focus that is a part of them."""
    found: list[Seen] = []
    sizes = LARGE if kind.startswith("small") else ORDINARY
    for sample in generate(seed, 10 * count, (kind,), sizes):
        pixels = np.asarray(sample.images[0].convert("RGB"))
        seen = texture(pixels, cell)
        focus = touched(sample.turns[0], seen.grid, cell)
        if focus.any() and not focus.all():
            found.append(Seen(pixels, seen, focus))
        if len(found) == 2 * count:
            break
    return found


def thirteenth(seen: Seen, candidate: str) -> Array:
    """(rows, columns), zero for the twelve alone."""
    make = CANDIDATES[candidate]
    return np.zeros(seen.texture.grid) if make is None else make(seen)


def salience(images: list[Seen], candidate: str) -> list[Array]:
    found = []
    for image in images:
        channels = image.texture.channels.copy()
        channels[:, :, CHANNELS.index("range")] = thirteenth(image, candidate)
        found.append(perspectival(replace(image.texture, channels=channels)).ravel())
    return found


def features(seen: Seen, candidate: str) -> Array:
    """(cells, features): each channel, its distance from the image's median, and the root of that."""
    channels = seen.texture.channels.astype(np.float64)
    channels[:, :, CHANNELS.index("range")] = thirteenth(seen, candidate)
    flat = channels.reshape(-1, len(CHANNELS))
    apart = np.abs(flat - np.median(flat, axis=0))
    return np.concatenate((flat, apart, np.sqrt(apart)), axis=1)


def fitted(x: Array, y: NDArray[np.bool_]) -> Callable[[Array], Array]:
    """Logistic regression by Newton's method, both classes of equal weight."""
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
    """Under the ROC curve; ties count half."""
    _, inverse, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[inverse]
    inside = int(focus.sum())
    return float((rank[focus].sum() - inside * (inside + 1) / 2) / (inside * (focus.size - inside)))


def regression(images: list[Seen], candidate: str) -> list[Array]:
    """Scores of the second half of the images."""
    half = len(images) // 2
    known = [features(image, candidate) for image in images]
    score = fitted(
        np.concatenate(known[:half]), np.concatenate([image.focus.ravel() for image in images[:half]])
    )
    return [score(values) for values in known[half:]]


def areas(
    score: Callable[[list[Seen], str], list[Array]], seen: dict[str, list[Seen]], name: str
) -> dict[str, Array]:
    found = {}
    for kind, images in seen.items():
        scores = score(images, name)
        judged = images[len(images) - len(scores) :]
        found[kind] = np.array([area(s, i.focus.ravel()) for s, i in zip(scores, judged, strict=True)])
    return found


def interval(differences: Array, repeats: int = 2000) -> tuple[float, float]:
    chosen = np.random.default_rng(0).integers(0, len(differences), (repeats, len(differences)))
    low, high = np.quantile(differences[chosen].mean(1), (0.025, 0.975))
    return float(low), float(high)


def table(
    score: Callable[[list[Seen], str], list[Array]], seen: dict[str, list[Seen]]
) -> dict[str, dict[str, float]]:
    print(f"{score.__name__:<18}" + "".join(f"{kind:>13}" for kind in KINDS) + f"{'mean':>8}  gain (95%)")
    results: dict[str, dict[str, float]] = {}
    base = None
    for name in CANDIDATES:
        found = areas(score, seen, name)
        every = np.concatenate(list(found.values()))
        base = every if base is None else base
        gain, (low, high) = (every - base).mean(), interval(every - base)
        results[name] = {kind: float(values.mean()) for kind, values in found.items()}
        results[name] |= {"mean": float(every.mean()), "gain": float(gain), "low": low, "high": high}
        cells = "".join(f"{100 * found[kind].mean():13.2f}" for kind in KINDS)
        print(
            f"{name:<18}{cells}{100 * every.mean():8.2f}  {100 * gain:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
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
    seen = {kind: looked_at(kind, args.images, args.cell, HELD_OUT_SEED + args.seed) for kind in KINDS}
    print(f"{2 * args.images} images of each kind, cells of {args.cell} pixels; area under the ROC curve, %")
    results = {score.__name__: table(score, seen) for score in (salience, regression)}
    print(json.dumps({"images": args.images, "cell": args.cell, "seed": args.seed, "areas": results}))


if __name__ == "__main__":
    main()
