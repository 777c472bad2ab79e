"""Reads little of what a collector of traces answers.

The exporter would read an answer to its end: one of gigabytes into memory, one that never ends for ever.
"""

from __future__ import annotations

import io
import time
from typing import Any

import requests
from requests.adapters import HTTPAdapter

MOST_BYTES = 64 * 1024
"""Bytes of an answer that are read."""
MOST_S = 5.0
"""Seconds for which an answer is read after its head."""


class BriefAnswers(HTTPAdapter):
    """Cuts answers after MOST_BYTES and MOST_S. Refuses redirects, which no collector needs."""

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send a request. Raises requests.RequestException."""
        response = super().send(request, *args, **options)
        if 300 <= response.status_code < 400:
            response.close()
            raise requests.TooManyRedirects("the collector answered with a redirect")
        response.raw = io.BytesIO(_beginning(response.raw))
        return response


def session() -> requests.Session:
    """Return a session whose answers are cut."""
    made = requests.Session()
    for scheme in ("http://", "https://"):
        made.mount(scheme, BriefAnswers())
    return made


def _beginning(raw: Any) -> bytes:
    """Return the first bytes of an answer. The connection stays usable only if the answer ends with them."""
    ends = time.monotonic() + MOST_S
    read = b""
    while len(read) < MOST_BYTES and time.monotonic() < ends:
        piece = raw.read1(MOST_BYTES - len(read), decode_content=False)
        if not piece:
            return read
        read += piece
    raw.close()
    return read
