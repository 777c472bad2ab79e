"""The rules that say which keys open which routes.

A path without a rule of its own needs an API key, so that a route that is added later is not open by mistake.
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN = ("/health", "/ping", "/ready", "/v2/health/live", "/v2/health/ready")
DOCS = ("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
PAGE_FILES = "/ui/"
METRICS = "/metrics"
VERSION = "/version"
ADMIN = "/admin"
LIVE = f"{ADMIN}/live"
PAGES = ("/", ADMIN)
ANY = frozenset(("api", "admin", "metrics"))
NOUNS = {"metrics": "metrics key", "admin": "admin key", "api": "API key"}


def is_limited(path: str) -> bool:
    """Whether requests to a path count towards the limits per minute of their client."""
    return path.startswith("/v1/") or path in ("/tokenize", "/detokenize", "/invocations")


def is_poll(method: str, path: str) -> bool:
    """Whether a request only asks how far a batch is, or ends it. These do not count towards a rate."""
    own = path.startswith(("/v1/batches/", "/v1/files/")) or path in ("/v1/batches", "/v1/files")
    return own and (method in ("GET", "DELETE") or path.endswith("/cancel"))


def is_measured(path: str) -> bool:
    """Whether the metrics count the requests to a path.

    Probes, scrapes and the calls of the page for operators, which come every second, are not counted.
    """
    return is_limited(path) or (path.startswith(f"{ADMIN}/") and path != LIVE)


def is_page(path: str) -> bool:
    """Whether a path is a page for people or a file of one. The figures that /admin shows are none."""
    return path in PAGES or path.startswith(PAGE_FILES)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one server.

    api, admin, metrics: whether there are keys of this role. A keys file counts as all three, whatever it
        holds: no route opens when the last key of a role is removed from it.
    open_metrics: whether /metrics needs no key.
    docs: on, off or key.
    page: whether there are pages at / and /admin. Their files are the same for everyone and hold no secrets.
    """

    api: bool = False
    admin: bool = False
    metrics: bool = False
    open_metrics: bool = False
    docs: str = "key"
    page: bool = False

    def roles(self, path: str) -> frozenset[str]:
        """Return the roles of which a key needs one to open a path. Empty: the path is open to all."""
        if path in OPEN or (self.page and is_page(path)):
            return frozenset()
        if path == METRICS:
            return self._metrics_roles()
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            return frozenset(("admin",)) if self.admin else self._api_roles()
        if path in DOCS and self.docs == "on":
            return frozenset()
        if path in DOCS or path == VERSION:
            return ANY if self.api else frozenset()
        return self._api_roles()

    def _metrics_roles(self) -> frozenset[str]:
        if self.open_metrics:
            return frozenset()
        if self.admin or self.metrics:
            return frozenset(("metrics", "admin"))
        return self._api_roles()

    def _api_roles(self) -> frozenset[str]:
        return frozenset(("api",)) if self.api else frozenset()


def noun(roles: frozenset[str]) -> str:
    """Name the kind of key that one of these roles needs."""
    if roles == ANY:
        return "key"
    return next(text for role, text in NOUNS.items() if role in roles)
