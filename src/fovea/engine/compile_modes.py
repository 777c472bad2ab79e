"""The setting that says which parts of a model torch compiles, and in which mode.

Examples: `encoder=default,decoder=max-autotune`, or one mode for all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fovea.core.errors import ConfigError

COMPONENTS = ("encoder", "projector", "decoder")
MODES = ("off", "default", "reduce-overhead", "max-autotune")
"""The modes of `torch.compile` by their names, and "off"."""


@dataclass(frozen=True, slots=True)
class CompileModes:
    """The compile mode of each component of a model: one of MODES for each of COMPONENTS."""

    encoder: str = "off"
    projector: str = "off"
    decoder: str = "off"

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse the setting.

        Raises ConfigError for an unknown component or mode, or a component that appears twice.
        """
        if text in MODES:
            return cls(text, text, text)
        modes: dict[str, str] = {}
        for part in text.split(","):
            name, _, mode = (word.strip() for word in part.partition("="))
            if name not in COMPONENTS or mode not in MODES or name in modes:
                raise ConfigError(
                    f"compile is {text!r}; accepted: one of {', '.join(MODES)}, "
                    f"or COMPONENT=MODE,... with each of {', '.join(COMPONENTS)} at most once",
                    param="compile",
                )
            modes[name] = mode
        return cls(**modes)

    @property
    def active(self) -> dict[str, str]:
        """The components that torch compiles, with their modes."""
        modes = {name: getattr(self, name) for name in COMPONENTS}
        return {name: mode for name, mode in modes.items() if mode != "off"}
