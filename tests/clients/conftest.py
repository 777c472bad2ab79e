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

from tests.clients.support import Server, serve

CLIENTS = ("anthropic", "litellm", "langchain_openai", "llama_index", "instructor")
FILES = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_table.py"]
collect_ignore = [] if all(map(find_spec, CLIENTS)) else FILES

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm else downloads prices when it is imported


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    batches = tmp_path_factory.mktemp("batches")
    with serve("--strict-requests", "false", "--batch-dir", str(batches)) as server:
        yield server
