"""A target size as checkpoints write it, and the arithmetic that turns it into pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Size:
    """Edges in pixels; for Qwen `shortest_edge`/`longest_edge` (or `min_pixels`/`max_pixels`) are areas in pixels."""

    FORMS_KEYS: ClassVar[tuple[str, ...]] = (
        "height",
        "width",
        "shortest_edge",
        "longest_edge",
        "min_pixels",
        "max_pixels",
    )

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    longest_edge: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def fixed(self) -> tuple[int, int] | None:
        """(height, width), where both are named."""
        return (self.height, self.width) if self.height and self.width else None

    @property
    def key(self) -> str:
        """The edges that are named."""
        return ",".join(f"{name}:{getattr(self, name)}" for name in self.FORMS_KEYS if getattr(self, name))


def with_shortest_edge(height: int, width: int, edge: int, longest: int | None = None) -> tuple[int, int]:
    """(height, width) of equal aspect with the shorter edge at `edge`, the longer at most `longest`.

    Fractions are cut, not rounded; with a limit, the longer edge follows from the unrounded shorter one, so that it
    lands on the limit (the rule of torchvision's and Hugging Face's resize).
    """
    short, long = min(height, width), max(height, width)
    exact: float = edge
    if longest is not None and long / short * edge > longest:
        exact = longest * float(short) / long
        edge = round(exact)
    if longest is not None and short == edge:
        return height, width
    far = int(exact * long / short)
    return (edge, far) if height <= width else (far, edge)
