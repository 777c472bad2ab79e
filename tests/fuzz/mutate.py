"""A simple mutator for machines without atheris. It knows words of the format, and no coverage."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

NUMBERS = (
    b"\0",
    b"\xff",
    b"\x7f\xff",
    b"\x80\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"0",
    b"-1",
    b"1e400",
    b"9" * 30,
)


class Mutator:
    """Makes new inputs from known ones. The same seed gives the same inputs."""

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], longest: int, seed: int) -> None:
        self.corpus = list(corpus) or [b""]
        self._words = [*words, *NUMBERS]
        self._longest = longest
        self._random = random.Random(seed)
        self._steps: tuple[Callable[[bytes], bytes], ...] = (
            self._flip, self._overwrite, self._insert, self._remove, self._repeat, self._splice, self._word,
            self._cut,
        )  # fmt: skip

    def next(self) -> bytes:
        """Return a changed copy of one of the inputs."""
        data = self._random.choice(self.corpus)
        for _ in range(self._random.choice((1, 1, 2, 3, 8))):
            data = self._random.choice(self._steps)(data)
        return data[: self._longest]

    def _at(self, data: bytes) -> int:
        """A place in the data. Half of them are in the first bytes, where headers are."""
        end = len(data) if self._random.random() < 0.5 else min(48, len(data))
        return self._random.randint(0, end)

    def _flip(self, data: bytes) -> bytes:
        at = self._at(data)
        return (
            data[:at]
            + bytes(byte ^ 1 << self._random.randint(0, 7) for byte in data[at : at + 1])
            + data[at + 1 :]
        )

    def _overwrite(self, data: bytes) -> bytes:
        at, new = self._at(data), self._random.randbytes(self._random.randint(1, 4))
        return data[:at] + new + data[at + len(new) :]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._random.randbytes(self._random.randint(1, 8)) + data[at:]

    def _remove(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + data[at + self._random.randint(1, 16) :]

    def _repeat(self, data: bytes) -> bytes:
        at, size = self._at(data), self._random.randint(1, 32)
        return data[:at] + data[at : at + size] * self._random.choice((2, 3, 40)) + data[at + size :]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self.corpus)
        return data[: self._at(data)] + other[self._at(other) :]

    def _word(self, data: bytes) -> bytes:
        at, word = self._at(data), self._random.choice(self._words)
        drop = len(word) if self._random.random() < 0.5 else 0
        return data[:at] + word + data[at + drop :]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._at(data)]
