"""Settings of request bodies."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting


@dataclass(frozen=True, slots=True)
class BodySettings:
    """Limits on request bodies."""

    max_body_mib: int = setting(64, "Largest request body, data URLs included.", low=1, high=4096)
    strict_requests: bool = setting(
        False,
        "Refuse requests with unknown fields. Otherwise these are ignored and named in the answer's header "
        "x-fovea-ignored-fields.",
    )
    max_bodies_mib: int = setting(
        256,
        "MiB of all request bodies together that are arriving, or whose images are not read yet.",
        low=1,
        high=1 << 20,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_bodies_mib < self.max_body_mib:
            raise ConfigError(
                f"max_bodies_mib is {self.max_bodies_mib}; accepted: at least max_body_mib "
                f"({self.max_body_mib})",
                param="max_bodies_mib",
            )
