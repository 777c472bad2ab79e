"""Measure the longest stall of the server's event loop for ordinary and hostile request bodies.

    python benchmarks/bodies.py [--mib 60] [--only NAME]

A process serves a simulated engine, and a heartbeat in its event loop notes how late it was at most. This
process sends one body after the other. For each it prints the status, the seconds until the answer, the
longest stall, the most processor time that the server used within one stall, and the server's peak memory. On
a machine that others use, only the processor time tells what the server itself takes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
CHAT, TEXT, IMAGES = "/v1/chat/completions", "/v1/completions", "/v1/images"
Make = Callable[[int], bytes]


def content(data: bytes, kind: str = "image") -> bytes:
    url = b'{"type":"%b_url","%b_url":{"url":"data:%b/png;base64,' % ((kind.encode(),) * 3)
    return b'{"max_tokens":1,"messages":[{"role":"user","content":[' + url + data + b'"}}]}]}'


def message(data: bytes) -> bytes:
    return b'{"max_tokens":1,"messages":[{"role":"user","content":"' + data + b'"}]}'


def noise(size: int) -> bytes:
    return base64.b64encode(os.urandom(3 * MIB) * (size // (4 * MIB) + 1))[: size // 4 * 4]


def filled(start: bytes, unit: bytes) -> Make:
    return lambda size: start + unit * (size // len(unit))


ORDINARY: dict[str, tuple[str, Make]] = {
    "short chat": (CHAT, lambda size: message(b"hello")),
    "image of 20 MiB": (CHAT, lambda size: content(noise(20 * MIB))),
    "image of 20 MiB from PHP": (CHAT, lambda size: content(noise(20 * MIB).replace(b"/", b"\\/"))),
    "video": (CHAT, lambda size: content(noise(size), "video")),
    "image in lines": (CHAT, lambda size: content(b"\\n".join([noise(MIB)[:76]] * (20 * MIB // 78)))),
    "text of 3.9 million": (CHAT, lambda size: message(b"x y " * 975_000)),
    "text of 3.9 million in escapes": (CHAT, lambda size: message(b"\\u4e00" * 3_900_000)),
    "text of 3.9 million in UTF-8": (CHAT, lambda size: message("中".encode() * 3_900_000)),
    "200,000 token ids": (TEXT, lambda size: json.dumps({"prompt": list(range(200_000))}).encode()),
    "4096 messages": (
        CHAT,
        lambda size: json.dumps({"messages": [{"role": "user", "content": [part()]}] * 4096}).encode(),
    ),
}
HOSTILE: dict[str, tuple[str, Make]] = {
    "wrong character at the end": (CHAT, lambda size: content(noise(size) + b"_AAA", "video")),
    "padding": (CHAT, lambda size: content(b"AAA" + b"=" * size + b"AAAA", "video")),
    "semicolons": (CHAT, lambda size: content(b";" * size)),
    "data URL of spaces": (CHAT, lambda size: content(b" " * size, "video")),
    "text of escapes": (CHAT, lambda size: message(b"\\u4e00" * (size // 6))),
    "text of quotes": (CHAT, lambda size: message(b'\\"' * (size // 2))),
    "text without end": (CHAT, lambda size: b'{"messages":"' + b"\\\\" * (size // 2)),
    "nested lists": (CHAT, filled(b'{"messages":', b"[")),
    "nested objects": (CHAT, filled(b'{"messages":', b'{"a":')),
    "empty lists": (IMAGES, filled(b'{"url":[', b"[],")),
    "empty strings": (IMAGES, filled(b'{"url":[', b'"",')),
    "short strings": (IMAGES, filled(b'{"url":[', b'"abcdefgh",')),
    "strings of 257": (IMAGES, filled(b'{"url":[', b'"' + b"x" * 257 + b'",')),
    "strings of 33 escapes": (IMAGES, filled(b'{"url":[', b'"' + b"\\n" * 33 + b'",')),
    "keys": (IMAGES, filled(b"{", b'"k":1,')),
    "token ids": (TEXT, filled(b'{"prompt":[', b"1,")),
    "floats": (TEXT, filled(b'{"prompt":[', b"1.2345678901234567,")),
    "long numbers": (TEXT, filled(b'{"prompt":[', b"9" * 510 + b",")),
    "spaces": (CHAT, filled(b"", b" ")),
    "closing brackets": (CHAT, filled(b"", b"]")),
    "29,000 empty lists": (IMAGES, lambda size: b'{"url":[' + b",".join([b"[]"] * 29_000) + b"]}"),
    "29,000 keys": (IMAGES, lambda size: b"{" + b",".join(b'"k%d":1' % at for at in range(29_000)) + b"}"),
    "9,000 wrong parts": (
        CHAT,
        lambda size: json.dumps({"messages": [{"role": "user", "content": [part(x=1)] * 4000}] * 2}).encode(),
    ),
    "7,000 images": (
        CHAT,
        lambda size: json.dumps(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}] * 3500}
                ]
                * 2
            }
        ).encode(),
    ),
    "7,000 unknown fields": (CHAT, lambda size: json.dumps(unknown_fields()).encode()),
}


def part(**extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", **extra}


def unknown_fields() -> dict[str, Any]:
    fields = {f"f{at}": 1 for at in range(1000)}
    names = ("visual_tokens", "stream_options", "response_format", "metadata", "logit_bias")
    return {
        "messages": [{"role": "user", "content": "x", **fields}],
        **fields,
        **dict.fromkeys(names, fields),
    }


class Heartbeat:
    """Answers /stall with the longest stall since the last time."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._worst = (0.0, 0.0)

    async def answer(self, request: Any) -> dict[str, float]:
        if self._task is None:
            self._task = asyncio.create_task(self._beat())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        worst, self._worst = self._worst, (0.0, 0.0)
        return {"wall": worst[0], "cpu": worst[1], "peak_mib": peak}

    async def _beat(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            late = time.perf_counter() - wall - 0.001
            worst = self._worst
            self._worst = max(worst[0], late), max(worst[1], min(late, time.process_time() - cpu))


def serve_simulation(port: int) -> None:
    from fovea.engine.config import EngineConfig
    from fovea.engine.simulate.serving import SimulatedEngine
    from fovea.planner.cost import CostModel
    from fovea.server.app import create_app
    from fovea.server.routing import Route
    from fovea.server.run import serve

    app = create_app(SimulatedEngine(EngineConfig(), CostModel()))
    app.router.add(Route("GET", "/stall", Heartbeat().answer))
    serve(app, "127.0.0.1", port)


def post(port: int, path: str, body: bytes) -> tuple[str, float]:
    """Send a body on a connection of its own. Return the status and the seconds until the answer."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            connection.sendall(body)
        except OSError:
            pass  # refused while it arrived
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except OSError:
            pass
    return answer[9:12].decode() or "none", time.perf_counter() - started


def stall(port: int) -> dict[str, float]:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(b"GET /stall HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    stalls: dict[str, float] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return stalls


def measure(port: int, name: str, path: str, body: bytes) -> dict[str, Any]:
    """Send a body twice, and keep the smaller stall: noise of other processes only makes it longer."""
    rows = []
    for _ in range(2):
        stall(port)
        status, seconds = post(port, path, body)
        rows.append({"body": name, "mib": len(body) / MIB, "status": status, "s": seconds, **stall(port)})
    row = min(rows, key=lambda row: float(str(row["cpu"])))
    print(
        f"{name:32} {row['mib']:6.1f} MiB  {row['status']}  {row['s']:6.2f} s"
        f"  stall {1000 * row['wall']:6.1f} ms  cpu {1000 * row['cpu']:6.1f} ms"
        f"  peak {row['peak_mib']:5.0f} MiB",
        flush=True,
    )
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--mib", type=int, default=60, help="size of the large bodies")
    arguments.add_argument("--only", default="", help="only bodies whose name contains this")
    arguments.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.serve:
        serve_simulation(args.serve)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(Path(__file__)), "--serve", str(port)])
    try:
        wait_for(port)
        rows = [
            measure(port, name, path, make(args.mib * MIB))
            for name, (path, make) in (ORDINARY | HOSTILE).items()
            if args.only in name
        ]
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(rows))


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            stall(port)
            return
        except (OSError, ValueError):
            time.sleep(0.1)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
