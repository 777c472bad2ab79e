"""A service of the Compose stack: what all of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def service(
    image: str,
    command: Sequence[str],
    *,
    health: Sequence[str],
    cpus: float,
    memory_mib: int,
    user: str = "",
    start_s: int = 30,
    stop_s: int = 10,
    temporary_mib: int = 64,
    **more: Any,
) -> dict[str, Any]:
    """Return a service without rights that it does not need.

    image: image with its tag.
    command: arguments of the image's entry point.
    health: command that succeeds if the service can be used.
    cpus, memory_mib: most processors and memory.
    user: user and group; "": those of the image.
    start_s: seconds in which failed health checks do not count.
    stop_s: seconds between SIGTERM and SIGKILL.
    temporary_mib: size of /tmp.
    more: further keys.
    """
    resources = {"limits": {"cpus": f"{cpus:g}", "memory": f"{memory_mib}m"}}
    reservations = more.pop("reservations", None)
    if reservations:
        resources["reservations"] = reservations
    values: dict[str, Any] = {
        "image": image,
        "command": list(command),
        "restart": "unless-stopped",
        **({"user": user} if user else {}),
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": 4096,
        "tmpfs": [f"/tmp:mode=1777,nosuid,nodev,exec,size={temporary_mib}m"],
        "stop_grace_period": f"{stop_s}s",
        "healthcheck": {
            "test": ["CMD", *health],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{start_s}s",
        },
        "deploy": {"resources": resources},
        "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
    }
    return {**values, **more}


def file_mount(source: str, target: str) -> dict[str, Any]:
    """Return a mount of a file or folder beside docker-compose.yaml, or of an absolute path, read-only.

    If the source is missing, Docker fails and creates no folder in its place.
    """
    path = source if source.startswith("/") else f"./{source}"
    return {
        "type": "bind",
        "source": path,
        "target": target,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def data_mount(volume: str, target: str) -> dict[str, Any]:
    """Return a mount of a volume for data."""
    return {"type": "volume", "source": volume, "target": target}
