"""The program `schemathesis`, which makes requests from the server's own description of its API."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.support import MODEL, Server, serve

EXAMPLES = 15
LIMIT_SECONDS = 900
# The other checks are wrong for this API. Two compare the status with the schema alone. But a request can
# fit the schema and be refused, because its model is unknown, its fields contradict each other or its picture
# is none (positive_data_acceptance). And it can contradict the schema and be accepted, because unknown fields
# are ignored (negative_data_rejection). The server has no keys here (ignored_auth,
# object_level_authorization), and no header that is required (missing_required_header).
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
)


@pytest.fixture(scope="module")
def short_server(pytestconfig: pytest.Config) -> Iterator[Server]:
    """A server whose context is short, so that answers are. It downloads nothing."""
    if pytestconfig.getoption("--through-gateway", default=False):
        pytest.skip("the gateway does not describe itself at /openapi.json")
    with serve("--max-context", "96", "--allow-remote", "false", "--max-body-mib", "1") as server:
        yield server


def failures(output: str) -> list[str]:
    """The failures that the program printed: the operation, and what was wrong."""
    found = re.findall(r"^_{3,} (.+?) _{3,}$|^- (ST\d+ .+)$", output, re.MULTILINE)
    return [operation or failure for operation, failure in found]


@pytest.mark.parametrize("phase", ["coverage", "fuzzing", "stateful"])
def test_description(short_server: Server, tmp_path: Path, phase: str) -> None:
    """requests made from /openapi.json get answers that it describes, and none is a 5xx"""
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{short_server.url}/openapi.json",
            f"--checks={','.join(CHECKS)}",
            f"--phases={phase}",
            f"--max-examples={EXAMPLES}",
            "--exclude-path=/v1/images/pdf",  # the program cannot make PDF files
            "--seed=1",
            "--continue-on-failure",
            "--suppress-health-check=all",
            "--request-timeout=60",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, f"{', '.join(failures(done.stdout))}\n{done.stdout}{done.stderr}"
    body = {"model": MODEL, "prompt": "the", "max_tokens": 1}
    assert httpx.post(f"{short_server.v1}/completions", json=body, timeout=60).status_code == 200
