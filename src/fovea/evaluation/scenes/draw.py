"""Draws a scene as RGB pixels. Equal scenes give equal bytes with the same version of Pillow.

The fonts of labels are subsets that ship with the package, and Pillow's own font.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fovea.evaluation.scenes.scene import Background, Box, Item, Label, Scene

FOLDER = Path(__file__).parent.parent / "fonts"
PILLOW = "pillow"
FONTS: tuple[str, ...] = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", PILLOW)


def _load(name: str, size: int) -> ImageFont.FreeTypeFont:
    if name == PILLOW:
        font = ImageFont.load_default(size)
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise RuntimeError("this Pillow lacks FreeType")
        return font
    return ImageFont.truetype(FOLDER / f"{name}.ttf", size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=512)
def font(name: str, height: int) -> ImageFont.FreeTypeFont:
    """The font in the smallest size at which a capital H is at least `height` pixels high. Cached."""
    size = height
    while True:
        candidate = _load(name, size)
        if -candidate.getbbox("H", anchor="ls")[1] >= height:
            return candidate
        size += 1


@lru_cache(maxsize=65536)
def advance(name: str, height: int, character: str) -> float:
    """Pixels from the start of this character to the start of the next, without tracking."""
    return font(name, height).getlength(character)


@lru_cache(maxsize=65536)
def ink(name: str, height: int, character: str) -> tuple[float, float, float, float]:
    """Box of a character's drawn pixels, (left, top, right, bottom), from its start on the baseline."""
    return font(name, height).getbbox(character, anchor="ls")


def text_width(text: str, name: str, height: int, tracking: float) -> float:
    """Pixels from the start of the first character to the end of the last."""
    return sum(advance(name, height, c) for c in text) + tracking * (len(text) - 1)


Points = list[tuple[float, float]]

_STAR = [
    (math.sin(k * math.pi / 5) * radius, -math.cos(k * math.pi / 5) * radius)
    for k, radius in enumerate((1.0, 0.42) * 5)
]
_ARM = 0.34
_OUTLINES: dict[str, Points] = {
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -0.95), (1.0, 0.85), (-1.0, 0.85)],
    "diamond": [(0.0, -1.0), (0.8, 0.0), (0.0, 1.0), (-0.8, 0.0)],
    "star": _STAR,
    "cross": [
        (-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM),
        (_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM),
    ],
}  # fmt: skip


def _backdrop(width: int, height: int, background: Background) -> Image.Image:
    if background.start == background.end and not background.noise:
        return Image.new("RGB", (width, height), background.start)
    start, end = (np.array(c, dtype=np.float32) for c in (background.start, background.end))
    length = height if background.vertical else width
    ramp = start + (end - start) * np.linspace(0, 1, length, dtype=np.float32)[:, None]
    line = np.rint(ramp).astype(np.int16)
    pixels = np.empty((height, width, 3), dtype=np.int16)
    pixels[:] = line[:, None] if background.vertical else line[None]
    if background.noise:
        noise = np.random.default_rng(background.noise_seed)
        amplitude = background.noise
        pixels += noise.integers(-amplitude, amplitude + 1, (height, width, 1), dtype=np.int16)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def outline(item: Item) -> Points:
    """The corners of an item's polygon in pixels; an empty list for a circle."""
    half = item.size / 2
    return [(item.x + half * dx, item.y + half * dy) for dx, dy in _OUTLINES.get(item.shape, [])]


def _draw_item(canvas: ImageDraw.ImageDraw, item: Item) -> None:
    if item.shape == "circle":
        half = item.size / 2 * 0.97
        canvas.ellipse((item.x - half, item.y - half, item.x + half, item.y + half), fill=item.rgb)
    else:
        canvas.polygon(outline(item), fill=item.rgb)


def glyphs(label: Label) -> list[tuple[str, float, float]]:
    """Each character with the x where it starts and the x where it ends, in pixels."""
    positions = []
    x = label.x
    for character in label.text:
        end = x + advance(label.font, label.height, character)
        positions.append((character, x, end))
        x = end + label.tracking
    return positions


def label_box(label: Label) -> Box:
    """The smallest box around the characters' ink.

    It reaches from about `baseline - height` to `baseline`; below the baseline if there is a J or Q.
    """
    inks = [(start, ink(label.font, label.height, character)) for character, start, _ in glyphs(label)]
    return (
        min(start + left for start, (left, _, _, _) in inks),
        label.baseline + min(top for _, (_, top, _, _) in inks),
        max(start + right for start, (_, _, right, _) in inks),
        label.baseline + max(bottom for _, (_, _, _, bottom) in inks),
    )


def _draw_label(canvas: ImageDraw.ImageDraw, label: Label) -> None:
    face = font(label.font, label.height)
    write: Callable[..., None] = canvas.text
    for character, start, _ in glyphs(label):
        write((start, label.baseline), character, fill=label.rgb, font=face, anchor="ls")


def draw(scene: Scene) -> Image.Image:
    """The scene's image, RGB, `scene.width` x `scene.height`."""
    image = _backdrop(scene.width, scene.height, scene.background)
    canvas = ImageDraw.Draw(image)
    for item in scene.items:
        _draw_item(canvas, item)
    for label in scene.labels:
        _draw_label(canvas, label)
    return image
