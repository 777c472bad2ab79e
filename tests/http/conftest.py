"""HTTP clients of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http_clients import one_tls_context


@pytest.fixture(autouse=True, scope="package")
def _cheap_clients() -> Iterator[None]:
    with one_tls_context():
        yield
