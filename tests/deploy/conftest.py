"""HTTP clients and decoders of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.decoders import kept_decoders
from tests.support.http_clients import one_tls_context


@pytest.fixture(autouse=True, scope="package")
def _cheap_clients_and_decoders() -> Iterator[None]:
    with one_tls_context(), kept_decoders():
        yield
