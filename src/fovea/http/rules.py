"""The limits of one server's connections, in bytes and seconds, and what its connections share."""

from __future__ import annotations

from fovea.http.address import Proxies
from fovea.http.notices import Notices
from fovea.http.settings import HttpSettings

KIB = 1024


class Rules:
    """Limits in bytes and seconds.

    header_bytes, url_bytes: longest request line with headers, and longest target.
    max_headers: most headers.
    header_s, body_s, write_s, keep_alive_s: times of `HttpSettings`.
    rate: bytes that give a body or an answer one more second.
    proxies: proxies whose X-Forwarded-For is believed.
    notices: writes the log.
    """

    __slots__ = (
        "body_s",
        "header_bytes",
        "header_s",
        "keep_alive_s",
        "max_headers",
        "notices",
        "proxies",
        "rate",
        "url_bytes",
        "write_s",
    )

    def __init__(self, settings: HttpSettings) -> None:
        self.header_bytes = settings.max_header_kib * KIB
        self.url_bytes = settings.max_url_kib * KIB
        self.max_headers = settings.max_headers
        self.header_s = settings.header_timeout_s
        self.body_s = settings.body_timeout_s
        self.write_s = settings.write_timeout_s
        self.keep_alive_s = settings.keep_alive_s
        self.rate = settings.least_rate_kib * KIB
        self.proxies = Proxies(settings.trusted_proxies)
        self.notices = Notices()
