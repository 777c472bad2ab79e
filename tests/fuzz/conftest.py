"""Fuzz targets silence loggers for as long as their process lives. The tests that follow need them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

LOGGERS = ("fovea.server", "transformers")


@pytest.fixture(autouse=True)
def _audible_loggers() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
