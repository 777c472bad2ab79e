"""Measure the processor time that the server adds to a chat request, with an engine that computes nothing.

    python benchmarks/server_cost.py [--repeats 5]

A client in the same process asks one request after the other on one connection: complete answers, and streams
of 200 pieces. Times include the client's own. The last line is JSON, in milliseconds of the process per
request, the least of all repeats.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.server.scripted import Script

from fovea.core.types import Delta, StageTimings, Usage
from fovea.server.app import create_app
from fovea.server.run import serving

PIECES = 200
REQUESTS = {"complete answer": 150, "stream of 200 pieces": 60}


def ask(client: http.client.HTTPConnection, *, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = client.getresponse()
    assert answer.status == 200
    answer.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    end = Delta(0, "", (), finish_reason="stop", usage=Usage(5, PIECES), timings=StageTimings())
    app = create_app(Script(*[Delta(0, " w", (1,))] * PIECES, end))
    best = dict.fromkeys(REQUESTS, float("inf"))
    with serving(app, uvloop.new_event_loop) as url:
        client = http.client.HTTPConnection(url.removeprefix("http://"))
        for _ in range(repeats):
            for name, count in REQUESTS.items():
                started = time.process_time()
                for _ in range(count):
                    ask(client, stream=name.startswith("stream"))
                best[name] = min(best[name], 1000 * (time.process_time() - started) / count)
    print(json.dumps({name: round(milliseconds, 2) for name, milliseconds in best.items()}))


if __name__ == "__main__":
    main()
