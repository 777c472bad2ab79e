"""The files of the page: a fixed table, read once. A request can name nothing outside of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
ADMIN = "admin.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; media-src blob:; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self)",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The names of the files never change, so a browser asks each time whether it has the newest one.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page. etag: the header by which a browser knows that its copy is the newest one."""

    body: bytes
    media_type: str
    etag: str


def read_folder(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Return all files of a folder by their names. Raises ConfigError if a page itself is missing."""
    files = {path.name: _read(path) for path in sorted(folder.glob("*")) if path.suffix in TYPES}
    for name in (INDEX, ADMIN):
        if name not in files:
            raise ConfigError(
                f"the page's file {folder / name} is missing; accepted: a complete installation, or page off",
                param="page",
            )
    return files


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
