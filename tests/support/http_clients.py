"""HTTP clients that cost little. Most tests make one for every request."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import pytest
from httpx._transports import default

_create = httpx.create_ssl_context


@cache
def _context(*variables: str | None) -> ssl.SSLContext:
    return _create()


def _create_or_share(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is not True or cert is not None or not trust_env:
        return _create(verify, cert, trust_env)
    return _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@contextmanager
def one_tls_context() -> Iterator[None]:
    """In the block, the clients of httpx and openai share the authorities that they trust.

    Each client would read the certificates of 140 of them, for 20 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", _create_or_share)
        yield
