"""SIGTERM under load: what new clients and running streams see until the process has ended."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter

from serving import INNOCENT_KEYS, Server, Setup

DRAIN_S, LAME_DUCK_S, STREAMS = 3, 4, 4
QUESTION = {
    "messages": [{"role": "user", "content": "Tell a long story."}], "stream": True, "max_tokens": 8000,
    "ignore_eos": True,
}  # fmt: skip


def check(patience: float = 60.0) -> tuple[Counter[str], list[str]]:
    """Terminate a server that writes long streams.

    Returns what new clients and streams saw, by kind, and the problems; none means that the check passed.
    """
    server = Server(Setup(flags=("--drain-seconds", str(DRAIN_S), "--lame-duck-s", str(LAME_DUCK_S))))
    try:
        server.wait_ready()
        ends: list[str] = []
        streams = [
            threading.Thread(target=lambda: ends.append(_stream(server.port, patience)))
            for _ in range(STREAMS)
        ]
        for stream in streams:
            stream.start()
        time.sleep(0.7)
        terminated = time.monotonic()
        server.terminate()
        time.sleep(0.2)
        seen = _new_clients(server, terminated, patience)
        for stream in streams:
            stream.join(patience)
        code = server.exit_code(patience)
    finally:
        server.stop()
    seen.update(f"stream: {end}" for end in ends)
    problems = [
        f"{count} new connections saw {kind!r}" for kind, count in seen.items() if kind.startswith("new: ")
    ]
    problems = [line for line in problems if "503 with Retry-After" not in line]
    problems += [
        f"a stream {end}" for end in ends if end not in ("ended with an error event", "was complete")
    ]
    problems += [] if len(ends) == STREAMS else [f"{STREAMS - len(ends)} streams never ended"]
    problems += [] if code == 0 else [f"the exit code was {code}"]
    problems += [] if any("503" in kind for kind in seen) else ["no new connection was answered"]
    return seen, problems


def _new_clients(server: Server, terminated: float, patience: float) -> Counter[str]:
    """Ask on new connections until the process has ended.

    terminated: time of SIGTERM. After the lame-duck time the port may be closed before the process ends.
    """
    seen: Counter[str] = Counter()
    while server.alive() and time.monotonic() < terminated + patience:
        asked = time.monotonic()
        kind = _outcome(server.port)
        if asked < terminated + LAME_DUCK_S or "503" in kind:
            seen[f"new: {kind}"] += 1
        server.exit_code(0.05)
    return seen


def _outcome(port: int) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as line:
            line.settimeout(10)
            line.sendall(_post({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}))
            answer = line.recv(65536).lower()
    except OSError as error:
        return "refused" if isinstance(error, ConnectionRefusedError) else type(error).__name__
    status = answer[9:12].decode("latin-1") or "closed"
    return f"{status} with Retry-After" if b"\nretry-after:" in answer else status


def _stream(port: int, patience: float) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as line:
            line.settimeout(patience)
            line.sendall(_post(QUESTION))
            data = b""
            while piece := line.recv(65536):
                data = data[-65536:] + piece
    except OSError as error:
        return f"broke with {type(error).__name__}"
    if b"data: [DONE]" in data:
        return "was complete"
    return "ended with an error event" if b'data: {"error"' in data else "was cut off"


def _post(body: object) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
        % (INNOCENT_KEYS[0].encode(), len(data), data)
    )
