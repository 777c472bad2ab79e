"""The findings of a check: errors, warnings and facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fovea.core.errors import FoveaError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a checkpoint, or may be.

    part: the part of the checkpoint, in one word, such as "weights".
    message: names the file, the fault, and what is accepted.
    """

    part: str
    message: str


@dataclass(slots=True)
class Report:
    """Everything that a check has found.

    name: the name that was checked.
    folder: the checkpoint's folder.
    errors: reasons why the folder does not load, or cannot answer a question about an image.
    warnings: things that a user should know; the folder loads.
    unchecked: parts that were not checked, each with the reason.
    facts: figures of the model by name. Bytes and counts are integers; "videos" is a bool.
    """

    name: str
    folder: Path
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    facts: dict[str, str | int] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Whether nothing was found that prevents the checkpoint from being served."""
        return not self.errors

    def add_error(self, part: str, message: str) -> None:
        self.errors.append(Finding(part, message))

    def add_warning(self, part: str, message: str) -> None:
        self.warnings.append(Finding(part, message))

    def skip(self, part: str, reason: str) -> None:
        """Note that a part was not checked."""
        self.unchecked.append(Finding(part, reason))

    def attempt(self, part: str, work: Callable[[], T]) -> T | None:
        """Return the result of a step of loading. If it fails, note an error of the part and return None."""
        try:
            return work()
        except FoveaError as error:
            self.add_error(part, error.message)
        except Exception as error:  # noqa: BLE001 - a library failed, so loading would fail, too
            self.add_error(part, f"{type(error).__name__}: {str(error)[:500]}")
        return None

    def as_json(self) -> dict[str, Any]:
        """The report as an object for programs."""
        lists = {
            name: [{"part": item.part, "message": item.message} for item in items]
            for name, items in (
                ("errors", self.errors),
                ("warnings", self.warnings),
                ("unchecked", self.unchecked),
            )
        }
        return {
            "name": self.name,
            "folder": str(self.folder),
            "loads": self.loads,
            **lists,
            "facts": self.facts,
        }
