"""Settings of `fovea profile`: which requests are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The requests whose time is measured."""

    image: Path | None = setting(None, "Image file of all requests; none: a generated image.")
    side: int | None = setting(
        None,
        "Width and height of the generated image in pixels. 0: no image. none: 448.",
        low=0,
        high=8192,
    )
    text: str = setting("Describe the picture.", "The question.")
    tokens: int = setting(32, "Tokens of every answer.", low=2, high=10**5)
    repeats: int = setting(3, "Requests one after another.", low=1, high=1000)
    requests: int = setting(8, "Requests of the steady load. 0: no load.", low=0, high=10**5)
    concurrency: int = setting(4, "Simultaneous requests of the load.", low=1, high=1024)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.image is not None and self.side is not None:
            raise ConfigError("side is for a generated image, but a file is given", param="side")
