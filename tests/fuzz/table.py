"""All targets of fuzzing. The module of a target is imported when it is needed: some load a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
NAMES = (
    "http",
    "body",
    "data_url",
    "image",
    "video",
    "tokenizer",
    "checkpoint",
    "quantized",
    "events",
    "config_file",
    "gateway",
    "answer_format",
    "gguf",
)


@dataclass(frozen=True)
class Target:
    """One reader of foreign data.

    run: reads the data. It raises only on a finding.
    seeds: small valid and invalid inputs to begin with.
    longest: most bytes of an input.
    words: pieces that the format is made of.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    longest: int
    words: tuple[bytes, ...]

    def corpus(self) -> list[bytes]:
        """The stored inputs: those that once were findings, or that reach rare code."""
        folder = CORPUS / self.name
        return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def load(name: str) -> Target:
    """Return the target of a name."""
    module = import_module(f"tests.fuzz.targets.{name}")
    return Target(name, module.target, module.seeds, module.LONGEST, module.WORDS)
