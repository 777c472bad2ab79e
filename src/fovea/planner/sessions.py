"""Workloads of clients that wait for their answers: what is asked, in which order.

The check of the planner plays the same sessions on a real engine and on the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

FITTED = ("short questions", "new images")
"""The workloads whose steps the cost model is fitted to."""
PREDICTED = ("text", "images", "shared image", "follow-ups", "mixed")
"""The workloads that are predicted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a client.

    text: words of the question.
    output: tokens of the answer.
    image: (key, width, height) of its image; None: it has none. Equal keys are equal images.
    continues: the request repeats the conversation so far.
    """

    text: int
    output: int
    image: tuple[str, int, int] | None = None
    continues: bool = False

    @property
    def pixels(self) -> int:
        """Pixels of its image; 0 without one."""
        return self.image[1] * self.image[2] if self.image else 0


Session = tuple[Turn, ...]
"""The requests of one client, one after another."""


def sessions(name: str, scale: float = 1.0, seed: int = 0) -> tuple[Session, ...]:
    """Return the sessions of one of the workloads of FITTED and PREDICTED.

    scale: factor of the sides of images, for models with small images.
    seed: another seed gives other sizes and other images.
    """
    random = Random(f"{name} {seed}")

    def image(key: str, *sides: int) -> tuple[str, int, int]:
        width, height = (int(random.choice(sides) * scale) for _ in range(2))
        return f"{name} {seed} {key}", width, height

    return _BUILDERS[name](random, image)


Draw = Callable[..., tuple[str, int, int]]


def _short(random: Random, image: Draw) -> tuple[Session, ...]:
    """Eight clients, so that batches of one to eight decode while prompts of many lengths arrive."""
    return tuple(
        tuple(Turn(random.choice((8, 40, 150, 500, 1200)), random.randint(8, 40)) for _ in range(5))
        for _ in range(8)
    )


def _new_images(random: Random, image: Draw) -> tuple[Session, ...]:
    sides = 160, 224, 320, 448, 640
    return tuple(
        tuple(
            Turn(random.randint(4, 30), random.randint(6, 24), image(f"{client} {n}", *sides))
            for n in range(5)
        )
        for client in range(3)
    )


def _text(random: Random, image: Draw) -> tuple[Session, ...]:
    return tuple(
        tuple(Turn(random.randint(100, 500), random.randint(32, 64)) for _ in range(4)) for _ in range(6)
    )


def _images(random: Random, image: Draw) -> tuple[Session, ...]:
    return tuple(
        tuple(
            Turn(random.randint(8, 24), random.randint(16, 32), image(f"{c} {n}", 336, 560)) for n in range(4)
        )
        for c in range(4)
    )


def _shared(random: Random, image: Draw) -> tuple[Session, ...]:
    one = image("only", 560)
    return tuple(
        tuple(Turn(random.randint(8, 40), random.randint(16, 48), one) for _ in range(5)) for _ in range(5)
    )


def _follow_ups(random: Random, image: Draw) -> tuple[Session, ...]:
    return tuple(
        (
            Turn(random.randint(8, 24), random.randint(16, 40), image(f"{client}", 448)),
            *(Turn(random.randint(8, 40), random.randint(16, 40), continues=True) for _ in range(4)),
        )
        for client in range(4)
    )


def _mixed(random: Random, image: Draw) -> tuple[Session, ...]:
    known = [image(f"known {n}", 336, 448) for n in range(3)]

    def turn(key: str) -> Turn:
        kind, output = random.random(), random.randint(16, 48)
        if kind < 0.5:
            return Turn(random.randint(20, 300), output)
        return Turn(
            random.randint(8, 24), output, random.choice(known) if kind < 0.75 else image(key, 336, 448)
        )

    return tuple(tuple(turn(f"{client} {n}") for n in range(5)) for client in range(6))


_BUILDERS: dict[str, Callable[[Random, Draw], tuple[Session, ...]]] = {
    "short questions": _short,
    "new images": _new_images,
    "text": _text,
    "images": _images,
    "shared image": _shared,
    "follow-ups": _follow_ups,
    "mixed": _mixed,
}
