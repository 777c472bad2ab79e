"""The vocabulary of scenes: colours, shapes, places, and the characters of codes."""

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

# O, I, 0 and 1 are left out, because some fonts draw them alike.
CODE_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# Seeds from here on are for evaluation only. Training uses lower ones.
HELD_OUT_SEED = 1_000_000_000


def plural(noun: str) -> str:
    """The plural of a noun: "crosses" for "cross", "stars" for "star"."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(noun: str) -> str:
    """The noun phrase with "a" or "an" before it."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def join_phrases(phrases: list[str]) -> str:
    """The phrases as a list in a sentence: "a", "a and b", "a, b and c"."""
    if len(phrases) < 2:
        return "".join(phrases)
    return ", ".join(phrases[:-1]) + " and " + phrases[-1]


def sentence(text: str) -> str:
    """The text with an upper first letter and a full stop."""
    return text[0].upper() + text[1:] + "."
