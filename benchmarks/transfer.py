"""Measure how long it takes to hand a value from one process to another, by each connector that is installed.

    python benchmarks/transfer.py [--mib 4] [--count 300] [--target-ms 5]

One hand-over is: offer, send the offer as JSON through a pipe, fetch, release, one byte back. For comparison,
the value itself goes through a Unix socket ("socket"). Every value is another one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.engine.transfer.connect import KINDS, ConnectorSettings, open_connector
from fovea.engine.transfer.connector import Connector, Offer

WARM_UP = 20
Times = tuple[float, float, float]
"""Seconds of the whole hand-over, of `offer`, and of `fetch`."""


def connect(kind: str, folder: str, size: int) -> Connector:
    capacity = max(16 * size, 1 << 20)
    return open_connector(
        ConnectorSettings(kind, capacity, Path(folder), host="127.0.0.1", landing_bytes=capacity)
    )


def consume(kind: str, folder: str, size: int, descriptor: int) -> None:
    """Run as the consumer's process: answer every offer with the seconds of its fetch."""
    with socket.socket(fileno=descriptor) as pipe:
        if kind == "socket":
            pipe.sendall(b"\n")
            while (data := receive(pipe, size)) is not None:
                assert len(data) == size
                pipe.sendall(b"0.0\n")
            return
        connector = connect(kind, folder, size)
        pipe.sendall(b"\n")
        for line in pipe.makefile("r"):
            offer = Offer.from_json(json.loads(line))
            begin = time.perf_counter()
            connector.fetch(offer, 30.0)
            took = time.perf_counter() - begin
            connector.release(offer)
            pipe.sendall(b"%f\n" % took)
        connector.close()


def receive(pipe: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = pipe.recv_into(view[done:])
        if not count:
            return None
        done += count
    return data


def measure(kind: str, size: int, count: int) -> list[Times]:
    """Hand values over to a new process. Raises ConfigError if the connector cannot be opened."""
    with tempfile.TemporaryDirectory(prefix="fovea-") as folder:
        connector = None if kind == "socket" else connect(kind, folder, size)
        here, there = socket.socketpair()
        command = [sys.executable, __file__, "--consume", kind, folder, str(size), str(there.fileno())]
        with subprocess.Popen(command, pass_fds=[there.fileno()]) as process, here:
            there.close()
            answers = here.makefile("r")
            answers.readline()  # it is ready
            times = [hand_over(connector, size, here, answers.readline) for _ in range(WARM_UP + count)]
            answers.close()
            here.shutdown(socket.SHUT_RDWR)
            process.wait()
        if connector is not None:
            connector.close()
        return times[WARM_UP:]


def hand_over(
    connector: Connector | None, size: int, pipe: socket.socket, answer: Callable[[], str]
) -> Times:
    data = os.urandom(16) * (size // 16)
    begin = time.perf_counter()
    if connector is None:
        pipe.sendall(data)
        answer()
        return time.perf_counter() - begin, 0.0, 0.0
    offer = connector.offer("ab", [data])
    assert offer is not None
    offered = time.perf_counter()
    pipe.sendall(json.dumps(offer.to_json()).encode() + b"\n")
    fetch = float(answer())
    if connector.kind == "mooncake":  # its consumers release over HTTP
        connector.release(offer)
    return time.perf_counter() - begin, offered - begin, fetch


def percentile(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    return round(sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1000, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=float, default=4.0, help="size of the value")
    parser.add_argument("--count", type=int, default=300, help="measured hand-overs")
    parser.add_argument("--target-ms", type=float, default=5.0, help="most milliseconds in the middle (p50)")
    parser.add_argument("--consume", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.consume:
        kind, folder, size, descriptor = arguments.consume
        consume(kind, folder, int(size), int(descriptor))
        return
    size = int(arguments.mib * (1 << 20)) // 16 * 16
    print(f"{'':>10} {'p50 ms':>8} {'p99 ms':>8} {'offer':>8} {'fetch':>8}  (p50 of the two parts)")
    result: dict[str, object] = {"bytes": size, "count": arguments.count}
    for kind in (*KINDS, "socket"):
        try:
            wholes, offers, fetches = (
                list(each) for each in zip(*measure(kind, size, arguments.count), strict=True)
            )
        except ConfigError as error:
            print(f"{kind:>10} {error}")
            continue
        p50, p99 = percentile(wholes, 0.5), percentile(wholes, 0.99)
        parts = percentile(offers, 0.5), percentile(fetches, 0.5)
        met = "" if kind == "socket" else "met" if p50 <= arguments.target_ms else "missed"
        print(f"{kind:>10} {p50:8.2f} {p99:8.2f} {parts[0]:8.2f} {parts[1]:8.2f}  {met}")
        result[kind] = {"p50_ms": p50, "p99_ms": p99}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
