"""The closed world that scenes are made of: colours, shapes, places, and the characters of codes."""

from __future__ import annotations

RGB = tuple[int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (218, 34, 38),
    "green": (36, 150, 58),
    "blue": (34, 74, 220),
    "yellow": (240, 212, 36),
    "orange": (245, 128, 22),
    "purple": (128, 44, 170),
    "pink": (246, 134, 196),
    "cyan": (54, 204, 222),
}
COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "star", "cross")
ROWS: tuple[str, ...] = ("top", "middle", "bottom")
CELLS: tuple[str, ...] = (
    "top left",
    "top center",
    "top right",
    "middle left",
    "center",
    "middle right",
    "bottom left",
    "bottom center",
    "bottom right",
)
DIRECTIONS: tuple[str, ...] = ("left", "right", "up", "down")

# O, I, 0 and 1 are left out: some fonts draw them alike.
CODE_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# Seeds from here on are for evaluation only; training draws from below.
HELD_OUT_SEED = 1_000_000_000


def plural(noun: str) -> str:
    """`crosses` for cross, else with an s."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(noun: str) -> str:
    """The noun phrase with a or an."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def joined(phrases: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(phrases) < 2:
        return "".join(phrases)
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]


def sentence(text: str) -> str:
    """Upper first letter and a full stop."""
    return text[0].upper() + text[1:] + "."
