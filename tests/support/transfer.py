"""Connectors of tests, and processes that offer and fetch values by them.

Run as a program, it opens a connector and obeys commands: `python -m tests.support.transfer KIND FOLDER`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fovea.engine.transfer.connect import ConnectorSettings, open_connector
from fovea.engine.transfer.connector import Connector, Offer, TransferFailed

ROOT = Path(__file__).parents[2]
KINDS = ("shm", "folder", "mooncake")
SLAB = 16 << 20


def why_skipped(kind: str) -> str | None:
    """Return why connectors of a kind cannot be tested here, or None."""
    if sys.platform != "linux":
        return "the connectors need Linux"
    if kind == "mooncake" and not has_mooncake():
        return "Mooncake's transfer engine is not installed, or lacks libibverbs1, librdmacm1 or libnuma1"
    return None


def has_mooncake() -> bool:
    """Tell whether the engine can be imported, without importing it: it starts threads and writes logs."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    with suppress(OSError):
        for library in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"):
            ctypes.CDLL(library)
        return True
    return False


def connector_of(kind: str, folder: Path, *, capacity: int = SLAB, lease_s: float = 30.0) -> Connector:
    return open_connector(
        ConnectorSettings(
            kind, capacity, folder / "transfer", lease_s=lease_s, host="127.0.0.1", landing_bytes=capacity
        )
    )


def random_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Worker:
    """A process with a connector."""

    def __init__(self, kind: str, folder: Path, lease_s: float = 30.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfer", kind, str(folder), str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return self.answer()

    def offer(self, size: int, seed: int = 0) -> Offer:
        """Have the process offer `random_bytes(size, seed)`."""
        return Offer.from_json(self.ask(do="offer", size=size, seed=seed))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop the process, and wait until all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(
            (each / "stat").read_text().rpartition(")")[2].split()[0] != "T" for each in tasks.iterdir()
        ):
            time.sleep(0.001)

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with suppress(OSError):
                pipe.close()


@contextmanager
def worker(kind: str, folder: Path, lease_s: float = 30.0) -> Iterator[Worker]:
    process = Worker(kind, folder, lease_s)
    try:
        yield process
    finally:
        process.end()


def obey(connector: Connector, command: dict[str, Any]) -> Any:
    """Carry out a command and return its answer."""
    if command["do"] == "offer":
        offer = connector.offer("ab12", [random_bytes(command["size"], command["seed"])])
        return None if offer is None else offer.to_json()
    if command["do"] == "stats":
        return connector.stats()
    offer = Offer.from_json(command["offer"])
    if command["do"] == "release":
        connector.release(offer)
        return None
    if command["do"] == "fetch for ever":
        while True:
            connector.fetch(offer, 10.0)
    try:
        return len(connector.fetch(offer, command["timeout_s"]))
    except TransferFailed as error:
        return str(error)


def main() -> None:
    kind, folder, lease_s = sys.argv[1:]
    connector = connector_of(kind, Path(folder), lease_s=float(lease_s))
    for line in sys.stdin:
        print(json.dumps(obey(connector, json.loads(line))), flush=True)
    connector.close()


if __name__ == "__main__":
    main()
