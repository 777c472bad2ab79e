"""Open connectors by kind."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from fovea.core.errors import ConfigError
from fovea.engine.transfer.connector import Connector, Offer

KINDS = ("shm", "mooncake", "folder")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of a connector. Raises ConfigError, naming the field.

    kind: "shm": shared memory on one host; "mooncake": between hosts; "folder": files of a shared folder.
    capacity_bytes: memory for offered values, or most bytes of the folder; at least 4096.
    folder: of the sockets (shm) or of the values (folder).
    lease_s: seconds after which an offer ends that nobody fetched (shm, mooncake); above 0.
    host: address of this host under which consumers reach it (mooncake).
    landing_bytes: memory that fetched values arrive in (mooncake); at least 4096.
    protocol: "tcp" or "rdma" (mooncake).
    device: network devices of RDMA, separated by commas; "": any (mooncake).
    """

    kind: str
    capacity_bytes: int = 1 << 30
    folder: Path | None = None
    lease_s: float = 30.0
    host: str = ""
    landing_bytes: int = 256 << 20
    protocol: str = "tcp"
    device: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind of a connector is {self.kind!r}; accepted: {', '.join(KINDS)}")
        for field in ("capacity_bytes", "landing_bytes"):
            if getattr(self, field) < 4096:
                raise ConfigError(
                    f"{field} of a connector is {getattr(self, field)}; accepted: 4096 and more"
                )
        if not 0 < self.lease_s < math.inf:
            raise ConfigError(f"lease_s of a connector is {self.lease_s}; accepted: seconds above 0")
        if self.kind == "mooncake" and not self.host:
            raise ConfigError("a connector of kind 'mooncake' needs `host`, the address of this host")
        if self.kind != "mooncake" and self.folder is None:
            raise ConfigError(f"a connector of kind {self.kind!r} needs `folder`")


def open_connector(settings: ConnectorSettings, *, tell: Callable[[Offer], None] | None = None) -> Connector:
    """Open a connector; its module is imported here only. Raises ConfigError.

    tell: sends the release of a consumer to the producer, for connectors that cannot (mooncake).
    """
    if settings.kind == "mooncake":
        from fovea.engine.transfer.mooncake import MooncakeConnector

        return MooncakeConnector(
            settings.host,
            settings.capacity_bytes,
            settings.landing_bytes,
            protocol=settings.protocol,
            device=settings.device,
            lease_s=settings.lease_s,
            tell=tell,
        )
    assert settings.folder is not None
    if settings.kind == "shm":
        from fovea.engine.transfer.shm import ShmConnector

        return ShmConnector(settings.folder, settings.capacity_bytes, lease_s=settings.lease_s)
    from fovea.engine.transfer.folder import FolderConnector

    return FolderConnector(settings.folder, settings.capacity_bytes, ttl_s=settings.lease_s)


def own_folder() -> Path:
    """Return the folder for sockets of this user, unless a setting names another."""
    return Path(gettempdir()) / f"fovea-{os.getuid()}"
