"""Parts of Envoy's configuration that occur in several places."""

from __future__ import annotations

from typing import Any


def typed(name: str, **values: Any) -> dict[str, Any]:
    """Return the configuration of an extension.

    name: its type, without the package of all extensions.
    """
    return {"@type": f"type.googleapis.com/envoy.extensions.{name}", **values}


def address(host: str, port: int) -> dict[str, Any]:
    """Return an address in Envoy's form."""
    return {"socket_address": {"address": host, "port_value": port}}


def seconds(value: float) -> str:
    """Return a duration in Envoy's form."""
    return f"{value:g}s"
