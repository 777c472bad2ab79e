"""Innocent clients: one sends small questions, one sends small pictures, each on a new connection.

Every fourth small question wants one of two words, another pair each time, so that costly forms of answers
would be noticed.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from PIL import Image
from serving import INNOCENT_KEYS

from fovea.core.measure import percentile

PAUSE_S, GIVE_UP_S, SIDE = 0.1, 20.0, 96


@dataclass
class Log:
    """The experience of one client: seconds of every request, and failures by kind."""

    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def at(self, share: float) -> float:
        return percentile(sorted(self.seconds), share)

    @property
    def worst(self) -> float:
        return max(self.seconds, default=0.0)


class Innocent(threading.Thread):
    """A client that asks, waits for the answer, pauses, and asks again until it is told to stop."""

    def __init__(self, port: int, kind: str) -> None:
        super().__init__(daemon=True, name=kind)
        self.kind = kind
        self.log = Log()
        self._port = port
        self._key = INNOCENT_KEYS[kind == "image"]
        self._done = threading.Event()
        self._count = 0

    def run(self) -> None:
        while not self._done.is_set():
            started = time.monotonic()
            problem = self._failure()
            self.log.seconds.append(time.monotonic() - started)
            if problem:
                self.log.failures[problem] += 1
            self._done.wait(PAUSE_S)

    def finish(self) -> Log:
        self._done.set()
        self.join(GIVE_UP_S + 5)
        return self.log

    def _failure(self) -> str:
        """Send one request. Returns the reason why it failed, empty if it did not."""
        self._count += 1
        content: object = f"What is {self._count} and one?"
        form = {} if self._count % 4 else {"guided_choice": [f"a{self._count}", f"b{self._count}"]}
        if self.kind == "image":
            seed = self._count + 1000 * (self._port % 1000)
            content = [
                {"type": "image_url", "image_url": {"url": picture(seed)}},
                {"type": "text", "text": "What?"},
            ]
            form = {}
        try:
            status, body = ask(self._port, self._key, content, **form)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        return "" if status == 200 and body.get("choices") else str(status)


def picture(seed: int) -> str:
    """A small PNG as a data URL, another one for each seed."""
    rng = np.random.default_rng(abs(seed))
    small = Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(
    port: int, key: str, content: object, tokens: int = 4, **fields: object
) -> tuple[int, dict[str, object]]:
    """Send a chat request on a new connection. Returns status and body. Raises OSError or HTTPException."""
    message = {"role": "user", "content": content}
    body = {"messages": [message], "max_tokens": tokens, "temperature": 0, **fields}
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    try:
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        line.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = line.getresponse()
        data = answer.read()
    finally:
        line.close()
    try:
        parsed = json.loads(data)
    except ValueError:
        return answer.status, {}
    return answer.status, parsed if isinstance(parsed, dict) else {}


def measure(port: int, seconds: float) -> dict[str, Log]:
    """Run both clients for so many seconds. Returns their logs by kind."""
    clients = [Innocent(port, kind) for kind in ("text", "image")]
    for client in clients:
        client.start()
    time.sleep(seconds)
    return {client.kind: client.finish() for client in clients}
