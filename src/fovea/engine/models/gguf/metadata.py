"""Typed access to the metadata of a GGUF file, with errors that name the entry and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from fovea.core.errors import CheckpointError
from fovea.engine.models.gguf.reader import GgufFile


class Metadata:
    """Entries of a file whose names begin with a prefix, such as "llama.".

    Numbers are checked for their type here. Their ranges are those of `files.check_bounds`.
    """

    def __init__(self, file: GgufFile, prefix: str = "") -> None:
        self._file, self._prefix = file, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._file.metadata

    def get(self, name: str) -> Any:
        """Return a value of any type; None: there is none."""
        return self._file.metadata.get(self._prefix + name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer. An array is one if all of its values are equal, as for all layers of a model.

        default: value of an entry that is missing; None: it must be there.
        """
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if type(value) is not int:
            self.refuse(name, "an integer, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number that is finite. default: see `integer`."""
        value: Any = default if self.get(name) is None else self.get(name)
        if type(value) not in (int, float) or not np.isfinite(value):
            self.refuse(name, "a finite number")
        return shortest(value) if type(value) is float else float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, "a boolean")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, str):
            self.refuse(name, "a text")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list):
            self.refuse(name, "an array of texts")
        return value

    def numbers(
        self, name: str, count: int | None = None, default: Sequence[float] | None = None
    ) -> list[Any]:
        """Return an array of numbers, or booleans.

        count: length that it must have.
        default: value of an array that is missing; None: it must be there.
        """
        value = self.get(name)
        if value is None and default is not None:
            return list(default)
        if not isinstance(value, np.ndarray) or (count is not None and len(value) != count):
            self.refuse(name, "an array of numbers" if count is None else f"an array of {count} numbers")
        return [shortest(number) if isinstance(number, float) else number for number in value.tolist()]

    def refuse(self, name: str, accepted: str) -> NoReturn:
        """Raise CheckpointError for an entry."""
        value = self.get(name)
        found = "is missing" if value is None else f"is {str(value)[:100]}"
        raise CheckpointError(f"{self._file.path}: {self._prefix}{name} {found}; accepted: {accepted}")


def shortest(number: float) -> float:
    """Return the number of a file as it was before it was rounded to 32 bits: 1e-5, not 9.99999974e-06.

    Of all decimal numbers that are rounded to the same one, it is the shortest.
    """
    return float(np.format_float_scientific(np.float32(number)))
