"""Three raylets on this machine: a cluster of Ray in processes, for tests. Needs ray.

As a program it starts them, prints the address, and obeys commands from its standard input, a line each:
`remove` (a node that is not the head, as a machine that loses its power), `add`, and the end of the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

SLOT = "slot"
"""A resource of which each node has one, so that replicas that need it are on different nodes."""
NODE = {"num_cpus": 4, "resources": {SLOT: 1}, "object_store_memory": 100 << 20, "memory": 4 << 30}


class Raylets:
    """The program, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._read()["address"])

    def say(self, command: str) -> dict[str, Any]:
        """Send a command, and return what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        raise RuntimeError(f"the raylets ended with status {self._process.wait()}")


@contextlib.contextmanager
def raylets(environment: dict[str, str], log: IO[str]) -> Iterator[Raylets]:
    """Start three raylets, and end them at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
    )
    try:
        yield Raylets(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    others = [cluster.add_node(**NODE) for _ in range(2)]
    _say({"address": cluster.address})
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(others.pop(), allow_graceful=False)
        elif line.strip() == "add":
            others.append(cluster.add_node(**NODE))
        _say({"nodes": 1 + len(others)})
    cluster.shutdown()


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
