"""Naive twins of functions in fovea.relevance, which compute one pixel or cell at a time."""

from __future__ import annotations

import math

import numpy as np

SOBEL_ACROSS = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))


def linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def lab(rgb: tuple[float, float, float]) -> tuple[float, float, float]:
    """CIE L*a*b* (CIE 15) of sRGB in [0, 1], from the primaries of ITU-R BT.709 and the white point D65."""
    primaries = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
    white = np.array((0.95047, 1.0, 1.08883))
    columns = np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in primaries]).T
    to_xyz = columns * np.linalg.solve(columns, white)
    shares = to_xyz @ np.array([linear(value) for value in rgb]) / white
    delta = 6 / 29
    fx, fy, fz = (t ** (1 / 3) if t > delta**3 else t / (3 * delta**2) + 4 / 29 for t in shares)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def grey(rgb: np.ndarray) -> int:
    """ITU-R 601-2 luma of three bytes, in 16 bits of fraction."""
    red, green, blue = (int(value) for value in rgb)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def sobel(luma: list[list[int]], row: int, column: int) -> tuple[int, int]:
    """Sobel x and y at a pixel. Beyond its border the image is continued with the pixels of the border."""
    height, width = len(luma), len(luma[0])
    across = down = 0
    for i in range(3):
        for j in range(3):
            y = min(max(row + i - 1, 0), height - 1)
            x = min(max(column + j - 1, 0), width - 1)
            across += SOBEL_ACROSS[i][j] * luma[y][x]
            down += SOBEL_ACROSS[j][i] * luma[y][x]
    return across, down


def cell_channels(pixels: np.ndarray, cell: int, row: int, column: int) -> dict[str, float]:
    """Every channel of one cell, computed by its definition."""
    height, width, _ = pixels.shape
    luma = [[grey(pixel) for pixel in line] for line in pixels]
    inside = [
        (y, x) for y in range(row * cell, (row + 1) * cell) for x in range(column * cell, (column + 1) * cell)
    ]
    steps = [sobel(luma, y, x) for y, x in inside]
    levels = [luma[y][x] for y, x in inside]
    colour = [sum(int(pixels[y, x, band]) for y, x in inside) / len(inside) / 255 for band in range(3)]
    rounded = tuple(math.floor(255 * value + 0.5) / 255 for value in colour)
    lightness, green_red, blue_yellow = lab((rounded[0], rounded[1], rounded[2]))
    y, x = (row + 0.5) / (height // cell), (column + 0.5) / (width // cell)
    return {
        "red": colour[0], "green": colour[1], "blue": colour[2],
        "lightness": lightness / 100,
        "green_red": green_red / 255 + 0.5, "blue_yellow": blue_yellow / 255 + 0.5,
        "sobel_x": sum(step[0] for step in steps) / len(steps) / 1020,
        "sobel_y": sum(step[1] for step in steps) / len(steps) / 1020,
        "sobel": sum(math.hypot(*step) for step in steps) / len(steps) / 1020,
        "y": y, "x": x, "eccentricity": math.hypot(y - 0.5, x - 0.5) / math.hypot(0.5, 0.5),
        "range": (max(levels) - min(levels)) / 255,
    }  # fmt: skip


def bilinear(table: np.ndarray, row: float, column: float) -> float:
    """Bilinear interpolation of the four entries around a place; the border's entries continue beyond it."""
    rows, columns = table.shape
    row, column = min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)
    top, left = int(row), int(column)
    bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
    down, across = row - top, column - left
    upper = table[top, left] * (1 - across) + table[top, right] * across
    lower = table[bottom, left] * (1 - across) + table[bottom, right] * across
    return float(upper * (1 - down) + lower * down)
