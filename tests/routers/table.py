"""Send requests through other people's routers to two engines, and write how many repeats found a warm one.

    make test-routers                                       # sets up the environment of the routers, too
    .venv-routers/bin/python -m tests.routers.table [--only dynamo] [--logs FOLDER]

It writes the table of docs/routers.md, and fails if a way that is to find the warm engine does so for fewer
than 90% of the repeats. The engines are those of .venv/bin/fovea, or of the command in the variable FOVEA.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.routers.stack import (
    BIN,
    BLOCK_TOKENS,
    FOVEA,
    MODEL,
    ROOT,
    Engine,
    ask,
    engines,
    free_port,
    router,
)
from tests.routers.stream import SUBJECTS, Ask, Found, Kind, Reply, body, judge, order, reply

PAGE = ROOT / "docs" / "routers.md"
BEGIN, END = "<!-- table of make test-routers -->\n", "<!-- end of the table -->\n"
LEAST = 0.9
AT_ONCE = 2
Front = Callable[[list[Engine], Path], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Way:
    """A router with a policy.

    front: runs it in front of engines.
    kind: what the requests are about.
    key: name of a header with a name of the subject; "": none.
    late: whether the first request about each subject goes straight to an engine, before the router starts.
    finds: whether it is to find the warm engine.
    note: why it does not, or what it needs.
    """

    package: str
    policy: str
    front: Front
    kind: Kind = "images"
    key: str = ""
    late: bool = False
    finds: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.package} {self.policy} {self.kind}{' late' if self.late else ''}"


class Row(NamedTuple):
    """A row of the table."""

    router: str
    policy: str
    kind: Kind
    found: Found
    note: str


def vllm_router(policy: str, *flags: str) -> Front:
    """vLLM's router with a policy; `kv_aware` is told where the engines announce their blocks."""

    def front(running: list[Engine], folder: Path) -> AbstractContextManager[str]:
        port = free_port()
        command = [
            str(BIN / "vllm-router"), "--port", str(port), "--policy", policy,
            "--prometheus-port", str(free_port()), "--worker-urls", *(one.url for one in running), *flags,
        ]  # fmt: skip
        if policy == "kv_aware":
            command += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_TOKENS)]
            for one in running:
                command += ["--kv-event-source", f"{one.url}={one.events}"]
                command += ["--kv-event-replay-source", f"{one.url}={one.replay}"]
        return router([command], f"http://127.0.0.1:{port}", folder, f"vllm-router-{policy}")

    return front


def smg(policy: str) -> Front:
    """The Shepherd Model Gateway with a policy."""

    def front(running: list[Engine], folder: Path) -> AbstractContextManager[str]:
        port = free_port()
        command = [
            str(BIN / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy,
            "--prometheus-port", str(free_port()), "--worker-urls", *(one.url for one in running),
        ]  # fmt: skip
        return router([command], f"http://127.0.0.1:{port}", folder, f"smg-{policy}")

    return front


def dynamo(*flags: str) -> Front:
    """Dynamo's frontend, and the worker of examples/ between it and the engines. flags: of the worker."""

    def front(running: list[Engine], folder: Path) -> AbstractContextManager[str]:
        port = free_port()
        worker = [sys.executable, str(ROOT / "examples" / "dynamo_worker.py"), *flags]
        worker += ["--block-size", str(BLOCK_TOKENS)]
        for one in running:
            worker += ["--engine", f"{one.url},{one.events},{one.replay}"]
        frontend = [
            sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
            "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq",
        ]  # fmt: skip
        shutil.rmtree(folder / "dynamo", ignore_errors=True)  # else the workers of an earlier run are found
        environment = {"DYN_FILE_KV": str(folder / "dynamo"), "DYN_LOG": "warn"}
        return router([worker, frontend], f"http://127.0.0.1:{port}", folder, "dynamo", environment)

    return front


def fovea(running: list[Engine], folder: Path) -> AbstractContextManager[str]:
    """Fovea's own gateway."""
    port = free_port()
    command = [*FOVEA, "gateway", "--port", str(port), "--response-cache-mib", "0", "--lame-duck-s", "0"]
    for one in running:
        command += ["--backend", one.url]
    return router([command], f"http://127.0.0.1:{port}", folder, "fovea")


def fovea_told(running: list[Engine], folder: Path) -> AbstractContextManager[str]:
    """Fovea's own gateway, which is told where the engines announce what they cache."""
    port = free_port()
    lines = ["response_cache_mib = 0"]
    for one in running:
        lines += ["[[backend]]", f'url = "{one.url}"']
        lines += [f'encoder_events = "{one.outputs}"', f'encoder_events_replay = "{one.outputs_replay}"']
        lines += [f'kv_events = "{one.events}"', f'kv_events_replay = "{one.replay}"']
    path = folder / "gateway.toml"
    path.write_text("\n".join(lines))
    command = [*FOVEA, "gateway", "--config", str(path), "--port", str(port), "--lame-duck-s", "0"]
    return router([command], f"http://127.0.0.1:{port}", folder, "fovea-told")


EVENTS_TEXT = "by events and renders"
TEXT_ONLY = "its `kv_aware` ignores the caches for prompts with images"
WEIGHT = "the same with Dynamo's own weight, which prefers an even load"
LATE = "started when the engines were warm"
WAYS: tuple[Way, ...] = (
    Way("vllm-router", "round_robin", vllm_router("round_robin"), finds=False, note="for comparison"),
    Way("vllm-router", "cache_aware", vllm_router("cache_aware"), finds=False, note="its default"),
    Way("vllm-router", "kv_aware", vllm_router("kv_aware"), finds=False, note=TEXT_ONLY),
    Way("vllm-router", "kv_aware", vllm_router("kv_aware"), kind="texts", note=EVENTS_TEXT),
    Way("vllm-router", "cache_aware", vllm_router("cache_aware"), kind="texts", finds=False,
        note="its default"),
    Way("vllm-router", "consistent_hash", vllm_router("consistent_hash"), key="x-session-id",
        note="the client names the image in `x-session-id`"),
    Way("smg", "cache_aware", smg("cache_aware"), finds=False, note="its default"),
    Way("smg", "consistent_hashing", smg("consistent_hashing"), key="x-smg-routing-key",
        note="the client names the image in `x-smg-routing-key`"),
    Way("ai-dynamo", "kv", dynamo(), note=EVENTS_TEXT),
    Way("ai-dynamo", "kv, prefill weight 1", dynamo("--prefill-weight", "1"), finds=False, note=WEIGHT),
    Way("fovea", "cache-affine", fovea, note="our own gateway, with its defaults"),
    Way("vllm-router", "kv_aware", vllm_router("kv_aware"), kind="texts", late=True, note=LATE),
    Way("ai-dynamo", "kv", dynamo(), late=True, note=LATE),
    Way("fovea", "cache-affine", fovea, late=True, finds=False, note=LATE),
    Way("fovea", "cache-affine, events", fovea_told, late=True, note=LATE),
)  # fmt: skip


def measure(way: Way, running: list[Engine], folder: Path) -> Found:
    """Play the stream of a way. Its subjects are its own, so that no engine knows them before."""
    asks = order(seed=1)
    if way.late:
        for first in asks[:SUBJECTS]:
            ask(running[first.subject % len(running)].url, body(way.kind, way.name, first))
        asks = asks[SUBJECTS:]
    with way.front(running, folder) as url:
        before = [one.answers() for one in running]

        def play(one: Ask) -> Reply:
            return reply(one, ask(url, body(way.kind, way.name, one), _headers(way, one)))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            replies = list(pool.map(play, asks))
        return judge(replies, [one.answers() - old for one, old in zip(running, before, strict=True)])


def _headers(way: Way, one: Ask) -> Mapping[str, str]:
    name = hashlib.sha256(f"{way.name} {one.subject}".encode()).hexdigest()
    return {way.key: name} if way.key else {}


def table(rows: Sequence[Row]) -> str:
    """Return the table, in Markdown."""
    head = (
        "| router | policy | requests about | reached a warm engine | requests to the busier engine | note |",
        "|---|---|---|---|---|---|",
    )
    lines = (
        f"| {row.router} | {row.policy} | {row.kind} | {row.found.warm} of {row.found.repeats}"
        f" ({row.found.share:.0%}) | {row.found.busier:.0%} | {row.note + ' ' if row.note else ''}|"
        for row in rows
    )
    return "".join(f"{line}\n" for line in (*head, *lines))


def write(page: Path, rows: Sequence[Row]) -> None:
    """Replace the table in a page."""
    text, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        f"{BEGIN}\n{table(rows)}\n{END}",
        page.read_text(),
        flags=re.S,
    )
    if count != 1:
        raise RuntimeError(f"{page} has no place for the table")
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only the ways in whose name this is; the page is not written"
    )
    parser.add_argument("--logs", type=Path, help="folder for the programs' logs (default: a temporary one)")
    options = parser.parse_args()
    rows, poor = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with engines(folder) as running:
            for way in WAYS:
                if options.only not in way.name:
                    continue
                found = measure(way, running, folder)
                version = "" if way.package == "fovea" else f" {importlib.metadata.version(way.package)}"
                rows.append(Row(f"{way.package}{version}", way.policy, way.kind, found, way.note))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                if way.finds and found.share < LEAST:
                    poor.append(way.name)
    if not options.only:
        write(PAGE, rows)
    if poor:
        print(f"fewer than {LEAST:.0%}: {', '.join(poor)}", file=sys.stderr)
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
