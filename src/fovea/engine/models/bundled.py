"""Reads the configuration of the bundled model without transformers.

To import transformers takes longer than to load this model and to answer a question with it. Its files say
everything, so that no default of transformers is needed; a test compares what both read.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fovea.core.names import bundled_model

PARTS = ("text_config", "vision_config")


def is_bundled(folder: Path) -> bool:
    """Whether a folder is that of the bundled model."""
    return folder.resolve() == bundled_model()


class PlainConfig(SimpleNamespace):
    """The content of a config.json, with the names of transformers' configurations."""

    @classmethod
    def of(cls, content: dict[str, Any]) -> PlainConfig:
        return cls(**{name: cls.of(value) if name in PARTS else value for name, value in content.items()})

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value.to_dict() if isinstance(value, PlainConfig) else value
            for name, value in vars(self).items()
        }
