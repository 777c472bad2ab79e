"""fovea caches: show or clear the caches of a running server."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from fovea.cli.common import call_server
from fovea.cli.text import aligned
from fovea.core.errors import ConfigError

STAGES = (
    "fetched", "decoded", "images", "pixels", "encoder", "regions", "host", "disk", "kv", "answers", "all",
)  # fmt: skip
COLUMNS = ("bytes", "capacity_bytes", "held_bytes", "entries", "hits", "misses", "evictions")


def register(commands: Any) -> None:
    parser = commands.add_parser("caches", description=__doc__)
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=_known_key(),
        metavar="KEY",
        help="key for /admin (default: the first of FOVEA_ADMIN_KEY, or of FOVEA_API_KEY)",
    )
    parser.add_argument(
        "--clear", choices=STAGES, metavar="STAGE", help=f"clear one cache: {', '.join(STAGES)}"
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    parser.set_defaults(run=run)


def _known_key() -> str:
    keys = os.environ.get("FOVEA_ADMIN_KEY") or os.environ.get("FOVEA_API_KEY") or ""
    return keys.split(",")[0].strip()


def run(args: argparse.Namespace) -> int:
    if args.clear:
        cleared = _ask(args, "DELETE", f"/admin/caches/{args.clear}")["cleared"]
        print(f"cleared: {', '.join(cleared)}")
        return 0
    body = _ask(args, "GET", "/admin/caches")
    print(json.dumps(body) if args.json else table(body["stages"]))
    return 0


def table(stages: dict[str, dict[str, float]]) -> str:
    """Return a table with a row per cache: bytes in MiB, "-" for a figure that the cache does not have."""
    rows = [["", *(name.replace("_bytes", "").replace("bytes", "MiB") for name in COLUMNS)]]
    for stage, values in stages.items():
        rows.append([stage, *(_shown(name, values.get(name)) for name in COLUMNS)])
    lines = [aligned(rows)]
    kv = stages.get("kv", {})
    if kv.get("query_tokens"):
        lines.append(f"prefix hits: {kv['hit_tokens']:.0f} of {kv['query_tokens']:.0f} tokens")
    return "\n".join(lines)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.1f}" if name.endswith("bytes") else f"{value:.0f}"


def _ask(args: argparse.Namespace, method: str, path: str) -> dict[str, Any]:
    """Send a request to the server and return the body. Raises ConfigError, with the reason, if it fails."""
    status, text = call_server(args.url, path, method=method, key=args.api_key)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"no Fovea server answers at {args.url}: {error}", param="url") from error
    if status >= 400:
        message = body.get("error", {}).get("message") if isinstance(body, dict) else None
        raise ConfigError(f"{args.url} refused: {message or status}", param="url")
    values: dict[str, Any] = body
    return values
