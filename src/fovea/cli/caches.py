"""fovea caches: what the caches of a running server hold, and forgetting it."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from fovea.core.errors import ConfigError

STAGES = ("fetched", "decoded", "images", "pixels", "encoder", "regions", "host", "disk", "kv", "all")
COLUMNS = ("bytes", "capacity_bytes", "held_bytes", "entries", "hits", "misses", "evictions")


def register(commands: Any) -> None:
    parser = commands.add_parser("caches", help="show or clear a server's caches", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        default=_known_key(),
        metavar="KEY",
        help="one that opens /admin; or FOVEA_ADMIN_KEY, or FOVEA_API_KEY, of several the first",
    )
    parser.add_argument("--clear", choices=STAGES, metavar="STAGE", help=f"forget one of {', '.join(STAGES)}")
    parser.add_argument("--json", action="store_true", help="as the server says it")
    parser.set_defaults(run=run)


def _known_key() -> str:
    keys = os.environ.get("FOVEA_ADMIN_KEY") or os.environ.get("FOVEA_API_KEY") or ""
    return keys.split(",")[0].strip()


def run(args: argparse.Namespace) -> int:
    if args.clear:
        cleared = _ask(args, "DELETE", f"/admin/caches/{args.clear}")["cleared"]
        print(f"cleared: {', '.join(cleared)}")
        return 0
    found = _ask(args, "GET", "/admin/caches")
    print(json.dumps(found) if args.json else table(found["stages"]))
    return 0


def table(stages: dict[str, dict[str, float]]) -> str:
    """A row per stage; bytes in MiB, "-" for what a stage does not count."""
    rows = [["", *(name.replace("_bytes", "").replace("bytes", "MiB") for name in COLUMNS)]]
    for stage, values in stages.items():
        rows.append([stage, *(_shown(name, values.get(name)) for name in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    kv = stages.get("kv", {})
    if kv.get("query_tokens"):
        lines.append(f"prefix hits: {kv['hit_tokens']:.0f} of {kv['query_tokens']:.0f} tokens")
    return "\n".join(lines)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.1f}" if name.endswith("bytes") else f"{value:.0f}"


def _ask(args: argparse.Namespace, method: str, path: str) -> dict[str, Any]:
    """Raises ConfigError for whatever keeps the server from answering, naming it."""
    import httpx

    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        answer = httpx.request(method, args.url.rstrip("/") + path, headers=headers, timeout=70)
        body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"no Fovea server answers at {args.url}: {error}", param="url") from error
    if answer.is_error:
        message = body.get("error", {}).get("message") if isinstance(body, dict) else None
        raise ConfigError(f"{args.url} refused: {message or answer.status_code}", param="url")
    found: dict[str, Any] = body
    return found
