"""Makes pages look scanned or photographed: tilt, shadow, low contrast, blur, noise and JPEG."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from fovea.evaluation.documents.page import Box, Page, Word

Affine = tuple[float, float, float, float, float, float]
"""Maps a point (x, y) to (a x + b y + c, d x + e y + f)."""


def scanned(rng: Random, page: Page, degrees: float = 1.5) -> Page:
    """The page as a scanner or a telephone would show it, with all places moved accordingly.

    degrees: the largest tilt.
    """
    turned = tilted(page, rng.uniform(-degrees, degrees))
    return replace(turned, name=f"{page.name}/scanned", image=worn(rng, turned.image))


def tilted(page: Page, degrees: float) -> Page:
    """The page, turned about its centre. Corners that come in are filled with the colour of its edge."""
    width, height = page.image.size
    turn = rotation(degrees, (width / 2, height / 2), (width / 2, height / 2))
    image = page.image.transform(
        (width, height), Image.Transform.AFFINE, inverse(turn), Image.Resampling.BICUBIC,
        fillcolor=page.image.getpixel((2, 2)),
    )  # fmt: skip
    words = tuple(moved(word, turn) for word in page.words)
    places = {at: moved_box(box, turn) for at, box in page.places.items()}
    return replace(page, image=image, words=words, places=places)


def worn(rng: Random, image: Image.Image) -> Image.Image:
    """The picture with some of: blur, a gradient of light, low contrast, noise, JPEG."""
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.7)))
    pixels = np.asarray(image, np.float32)
    if rng.random() < 0.4:
        pixels = pixels * _light(rng, pixels.shape[0], pixels.shape[1])
    if rng.random() < 0.4:
        share = rng.uniform(0.4, 0.9)
        pixels = pixels * share + (1 - share) * rng.uniform(90, 235)
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.randrange(2**31)).standard_normal(pixels.shape[:2], np.float32)
        pixels = pixels + (rng.uniform(2, 12) * noise)[..., None]
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if rng.random() < 0.5:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(35, 85))
        image = Image.open(file).convert("RGB")
    return image


def _light(rng: Random, height: int, width: int) -> NDArray[np.float32]:
    """A factor for each pixel, (height, width, 1): a soft edge of shadow across the page."""
    angle, dark = rng.uniform(0, 2 * math.pi), rng.uniform(0.55, 0.92)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    along = (x / width - 0.5) * math.cos(angle) + (y / height - 0.5) * math.sin(angle)
    ramp = 1 / (1 + np.exp((along - rng.uniform(-0.3, 0.3)) * rng.uniform(3, 20)))
    light: NDArray[np.float32] = (dark + (1 - dark) * ramp)[..., None].astype(np.float32)
    return light


def rotation(
    degrees: float, centre: tuple[float, float], to: tuple[float, float], scale: float = 1.0
) -> Affine:
    """Turns and scales about `centre`, which lands on `to`."""
    cos, sin = scale * math.cos(math.radians(degrees)), scale * math.sin(math.radians(degrees))
    return (
        cos, -sin, to[0] - cos * centre[0] + sin * centre[1],
        sin, cos, to[1] - sin * centre[0] - cos * centre[1],
    )  # fmt: skip


def inverse(affine: Affine) -> Affine:
    """The map in the other direction, which PIL's transform takes."""
    a, b, c, d, e, f = affine
    det = a * e - b * d
    return (e / det, -b / det, (b * f - c * e) / det, -d / det, a / det, (c * d - a * f) / det)


def moved(word: Word, affine: Affine) -> Word:
    """The word at its new place. Under a tilt its box is the one around the turned box."""
    a, b, c = affine[:3]
    starts = tuple(a * x + b * word.middle + c for x in word.starts)
    return replace(word, box=moved_box(word.box, affine), starts=starts)


def moved_box(box: Box, affine: Affine) -> Box:
    """The upright box around a box that was moved."""
    a, b, c, d, e, f = affine
    corners = [(x, y) for x in (box[0], box[2]) for y in (box[1], box[3])]
    across, down = [a * x + b * y + c for x, y in corners], [d * x + e * y + f for x, y in corners]
    return min(across), min(down), max(across), max(down)
