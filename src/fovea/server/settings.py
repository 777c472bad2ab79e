"""Every setting of the server. Frozen once made."""

from __future__ import annotations

from dataclasses import dataclass, field

from fovea.core.errors import ConfigError
from fovea.media.limits import MediaLimits

MIB = 1024 * 1024
SCOPES = ("shared", "key")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """api_keys: any of them opens /v1; none leaves it open.
    admin_keys: any of them, and no other key, opens /admin; none leaves it to api_keys.
    cache_scope: "shared": requests of equal cache_salt share all caches; "key": only under the same API key, too.
    max_body_mib: largest request body, data URLs included. [1, 4096].
    drain_seconds: what running requests get after SIGTERM. [0, 3600].
    request_timeout: seconds after which a request is given up where it names none itself; 0: never.
    fetch_cache_mib: ceiling of the bytes kept of images and videos from URLs. 0 keeps none. [0, 2**20].
    fetch_ttl: seconds for which they are kept at most; within it, used as their hosts' headers allow. [1, 2592000].
    decoded_cache_mib: ceiling of decoded images kept by their content. 0 keeps none. [0, 2**20].
    decoded_ttl: seconds for which they are kept at most; 0: no limit but the ceiling. [0, 2592000].
    image_store_mib: ceiling of images sent ahead to /v1/images, decoded. 0 keeps none. [0, 2**20].
    image_ttl: seconds for which they are kept. [1, 2592000].
    media: what images may cost, and from where they may come.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cache_scope: str = "shared"
    max_body_mib: int = 64
    drain_seconds: float = 30.0
    request_timeout: float = 0.0
    fetch_cache_mib: int = 128
    fetch_ttl: float = 3600.0
    decoded_cache_mib: int = 256
    decoded_ttl: float = 0.0
    image_store_mib: int = 256
    image_ttl: float = 3600.0
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_body_mib", 1, 4096),
            ("drain_seconds", 0, 3600),
            ("request_timeout", 0, 86_400),
            ("fetch_cache_mib", 0, 1 << 20),
            ("fetch_ttl", 1, 2_592_000),
            ("decoded_cache_mib", 0, 1 << 20),
            ("decoded_ttl", 0, 2_592_000),
            ("image_store_mib", 0, 1 << 20),
            ("image_ttl", 1, 2_592_000),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; accepted: {low} to {high}", param=name)
        for name in ("api_keys", "admin_keys"):
            if any(not key.strip() for key in getattr(self, name)):
                raise ConfigError(f"one of {name} is empty", param=name)
        if self.cache_scope not in SCOPES:
            raise ConfigError(
                f"cache_scope is {self.cache_scope!r}; accepted: {', '.join(SCOPES)}", param="cache_scope"
            )
        if self.cache_scope == "key" and not self.api_keys:
            raise ConfigError(
                "cache_scope is 'key', which keeps API keys apart, and there are none", param="cache_scope"
            )
