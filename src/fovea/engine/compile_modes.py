"""Which parts of a model torch compiles, and how: `encoder=default,decoder=max-autotune`, or one mode for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fovea.core.errors import ConfigError

COMPONENTS = ("encoder", "projector", "decoder")
MODES = ("off", "default", "reduce-overhead", "max-autotune")
"""By the names of `torch.compile`."""


@dataclass(frozen=True, slots=True)
class CompileModes:
    """One of MODES for each of COMPONENTS."""

    encoder: str = "off"
    projector: str = "off"
    decoder: str = "off"

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises ConfigError for a component or a mode that there is not, and for a component named twice."""
        if text in MODES:
            return cls(text, text, text)
        chosen: dict[str, str] = {}
        for part in text.split(","):
            name, _, mode = (word.strip() for word in part.partition("="))
            if name not in COMPONENTS or mode not in MODES or name in chosen:
                raise ConfigError(
                    f"compile is {text!r}; accepted: one of {', '.join(MODES)}, or COMPONENT=MODE,... with each of "
                    f"{', '.join(COMPONENTS)} at most once",
                    param="compile",
                )
            chosen[name] = mode
        return cls(**chosen)

    @property
    def chosen(self) -> dict[str, str]:
        """The components that are compiled, and their modes."""
        found = {name: getattr(self, name) for name in COMPONENTS}
        return {name: mode for name, mode in found.items() if mode != "off"}
