"""One server for the tests of all clients.

These tests run in an environment of their own, because the clients need many packages: see table.py. The
other tests run without it, and then nothing of this folder is collected but the test of the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.support import Server, gateway, serve

CLIENTS = ("anthropic", "litellm", "langchain_openai", "llama_index", "instructor")
FILES = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_table.py"]
collect_ignore = [] if all(map(find_spec, CLIENTS)) else FILES

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm else downloads prices when it is imported


THROUGH_GATEWAY = "--through-gateway"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(THROUGH_GATEWAY, action="store_true", help="put `fovea gateway` in front of the server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect that tests of what the gateway does not offer fail there."""
    if not config.getoption(THROUGH_GATEWAY, default=False):
        return
    for item in items:
        for mark in item.iter_markers("not_at_gateway"):
            item.add_marker(pytest.mark.xfail(strict=True, reason=mark.args[0]))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server, or a gateway in front of it."""
    batches = tmp_path_factory.mktemp("batches")
    with serve("--strict-requests", "false", "--batch-dir", str(batches)) as server:
        if not pytestconfig.getoption(THROUGH_GATEWAY, default=False):
            yield server
            return
        with gateway(server) as front:
            yield front
