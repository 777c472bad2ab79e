"""Every setting of the server. Frozen once made."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.core.errors import ConfigError
from fovea.media.limits import MediaLimits

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """api_keys: any of them opens /v1; none leaves it open.
    max_body_mib: largest request body, data URLs included. [1, 4096].
    drain_seconds: what running requests get after SIGTERM. [0, 3600].
    request_timeout: seconds after which a request is given up where it names none itself; 0: never.
    image_store_mib: ceiling of images sent ahead to /v1/images, decoded. 0 keeps none. [0, 2**20].
    image_ttl: seconds for which they are kept. [1, 2592000].
    media: what images may cost, and from where they may come.
    """

    api_keys: tuple[str, ...] = ()
    max_body_mib: int = 64
    drain_seconds: float = 30.0
    request_timeout: float = 0.0
    image_store_mib: int = 256
    image_ttl: float = 3600.0
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_body_mib", 1, 4096),
            ("drain_seconds", 0, 3600),
            ("request_timeout", 0, 86_400),
            ("image_store_mib", 0, 1 << 20),
            ("image_ttl", 1, 2_592_000),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; accepted: {low} to {high}", param=name)
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty", param="api_keys")
