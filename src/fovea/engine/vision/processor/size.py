"""Target sizes as checkpoints write them, and the arithmetic that turns them into pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Size:
    """A target size, of which a checkpoint names some fields.

    All fields are edges in pixels, except for Qwen: there `shortest_edge` and `longest_edge`, or `min_pixels`
    and `max_pixels`, are areas in pixels.
    """

    NAMES: ClassVar[tuple[str, ...]] = (
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
    def fixed_size(self) -> tuple[int, int] | None:
        """(height, width) if both are named, else None."""
        return (self.height, self.width) if self.height and self.width else None

    @property
    def key(self) -> str:
        """The named fields, as part of a cache key."""
        return ",".join(f"{name}:{getattr(self, name)}" for name in self.NAMES if getattr(self, name))


def with_shortest_edge(height: int, width: int, edge: int, longest: int | None = None) -> tuple[int, int]:
    """(height, width) of equal aspect; the shorter edge is `edge`, the longer edge at most `longest`.

    Fractions are cut off, not rounded. With a limit, the longer edge is computed from the unrounded shorter
    one, so that it equals the limit. This is the rule of torchvision's and Hugging Face's resize.
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
