"""Checks the tensors of a checkpoint by the headers of its files, or by the names of its index."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fovea.engine.check.report import Report
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.targets import Assignment, Problem, TensorEntry, assign
from fovea.engine.models.weights import Shards, find_shards, read_entries

PART = "weights"
MOST_GROUPS = 40
"""Most findings about tensors; the rest are counted."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots, such as that of a layer."""
_PLURAL = {
    "unknown": "are not part of this architecture",
    "missing": "are missing",
    "repeated": "are there a second time",
}


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors that a checkpoint has, as far as it can be told.

    files: name and tensors of each file. Of a file that is not there, only the names are known.
    whole: whether the names of all tensors are known.
    """

    files: tuple[tuple[str, Sequence[TensorEntry]], ...]
    whole: bool = True

    @property
    def entries(self) -> Iterator[TensorEntry]:
        for _, entries in self.files:
            yield from entries


def read_stored(folder: Path, report: Report, refused: Sequence[Path]) -> StoredTensors | None:
    """Read all headers, and report files that are missing or broken. Returns None if there are no names.

    refused: files that must not be opened.
    """
    if any(path.name == "model.safetensors.index.json" for path in refused):
        return None
    shards = report.attempt(PART, lambda: find_shards(folder))
    if shards is None:
        return None
    _report_missing(folder, shards, report)
    files: list[tuple[str, Sequence[TensorEntry]]] = []
    indexed: dict[str, list[TensorEntry]] = {}
    for name, file in shards.index.items():
        indexed.setdefault(file, []).append(TensorEntry(name))
    whole = True
    for path in shards.files:
        content = None if path in refused else report.attempt(PART, lambda path=path: read_entries(path))  # type: ignore[misc]
        if content is not None:
            files.append((path.name, content[0]))
        elif path.name in indexed:
            files.append((path.name, indexed[path.name]))
        else:
            whole = False
    files += [(name, indexed[name]) for name in shards.missing]
    unknown = sum(entry.shape is None for _, entries in files for entry in entries)
    if unknown:
        report.skip(
            PART,
            f"shapes and types of {unknown} tensors were not checked, only the names that the index gives "
            "them: their files are not there, or cannot be read",
        )
    return StoredTensors(tuple(files), whole)


def _report_missing(folder: Path, shards: Shards, report: Report) -> None:
    if shards.missing:
        count = len(shards.files) + len(shards.missing)
        names = [name[:100] for name in shards.missing[:3]]
        report.add_error(PART, f"{folder}: {len(shards.missing)} of {count} shards are missing: {names}")


def check_tensors(stored: StoredTensors, model: VisionLanguageModel, report: Report) -> Assignment:
    """Compare the stored tensors with those of the model, and report what does not fit."""
    targets = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_targets()}
    assignment = assign(stored.files, targets, model.ignored, model.renames, model.fused_tensors())
    problems = assignment.problems
    if not stored.whole:
        problems = tuple(problem for problem in problems if problem.kind != "missing")
        report.skip(PART, "which tensors are missing: a file cannot be read, and there is no index")
    messages = group_problems(problems)
    for message in messages[:MOST_GROUPS]:
        report.add_error(PART, message)
    if len(messages) > MOST_GROUPS:
        report.add_error(PART, f"{len(messages) - MOST_GROUPS} more kinds of tensors do not fit")
    return assignment


def group_problems(problems: Sequence[Problem]) -> list[str]:
    """Return a message for each kind of problem. Tensors whose names differ by numbers alone share one."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        key = problem.kind, _NUMBER.sub("N", problem.name), problem.text
        groups.setdefault(key, []).append(problem)
    return [
        str(group[0]) if len(group) == 1 else _describe(kind, pattern, text, group)
        for (kind, pattern, text), group in groups.items()
    ]


def _describe(kind: str, pattern: str, text: str, group: Sequence[Problem]) -> str:
    """The message of several tensors. kind, pattern, text: what they have in common."""
    what = _PLURAL.get(kind) or text.replace("has ", "have ", 1)
    numbers = [int(_NUMBER.findall(problem.name)[0][:9]) for problem in group if _NUMBER.search(problem.name)]
    span = f", N from {min(numbers)} to {max(numbers)}" if numbers else ""
    return f"{len(group)} tensors {pattern[:300]!r}{span} {what}"
