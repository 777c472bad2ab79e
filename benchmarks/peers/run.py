"""Fovea beside vLLM, OpenVINO GenAI, llama.cpp and transformers: installed, started and measured in one run.

    python benchmarks/peers/run.py [--engines fovea,vllm] [--precision bf16,int8,int4] [--repeats 3] [--quick]

The first run installs each peer in a venv of its own beneath --cache, which takes an hour and 8 GB; later runs start at
once. A peer that can not be installed or started is on the page with the reason. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import page
from measure import Plan, measure
from process import Server, free_port
from servers import NAMES, load
from servers.base import Engine, Home, SetupError

from checkpoint import write_checkpoint
from fovea.bench.settings import FIXED, Shape

PRECISIONS = ("bf16", "int8", "int4")
TEXT_TOKENS, PROMPT_WORDS = 56, 37
"""The chat template, its markers of an image and the mark of a text are the rest."""
START_S = 1200.0
"""A first start of vLLM compiles for minutes."""


@dataclass(frozen=True)
class Settings:
    cache: Path
    checkpoint: Path
    cores: tuple[int, ...]
    repeats: int
    warmups: int
    workloads: tuple[str, ...]

    def home(self, name: str) -> Home:
        return Home(self.cache / name, self.cores)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the servers are stopped, too
    cores = tuple(int(core) for core in args.cores.split(","))
    _leave(cores)
    cache = args.cache.expanduser().resolve()
    settings = Settings(
        cache, write_checkpoint(cache / _checkpoint_name()), cores, args.repeats, 0 if args.quick else 1,
        tuple(args.workloads.split(",")),
    )  # fmt: skip
    names, precisions = args.engines.split(","), args.precision.split(",")
    if args.setup:
        set_up(names, precisions, settings)
    else:
        run(names, precisions, settings, args.out)


def run(names: list[str], precisions: list[str], settings: Settings, out: Path) -> None:
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(settings.cores),
        "checkpoint_mib": (settings.checkpoint / "model.safetensors").stat().st_size / 2**20,
        "shape": {"visual_tokens": 256, "text_tokens": TEXT_TOKENS, "output_tokens": 64},
        "repeats": settings.repeats,
        "precisions": {at: compare(names, at, settings) for at in precisions},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    page.write(found, out)
    print(page.page(found))
    print(json.dumps(found))


def set_up(names: list[str], precisions: list[str], settings: Settings) -> None:
    """Install and convert, and say what came of it."""
    for name in names:
        engine, home, began = load(name), settings.home(name), time.monotonic()
        try:
            engine.set_up(home)
            for precision in set(precisions) & set(engine.precisions):
                engine.convert(home, settings.checkpoint, precision)
            said = ", ".join(f"{what} {version}" for what, version in engine.versions(home).items())
        except SetupError as error:
            said = str(error)
        print(f"{name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)


def compare(names: list[str], precision: str, settings: Settings) -> dict[str, Any]:
    """All engines that have the precision, on the page's terms; those that have not, with the reason."""
    entries: dict[str, dict[str, Any]] = {}
    with _stopped_at_the_end() as servers:
        for name in names:
            engine = load(name)
            entries[name] = {"title": engine.title}
            try:
                servers[name] = _started(name, engine, precision, settings, entries[name])
            except SetupError as error:
                entries[name]["reason"] = str(error)
            said = entries[name].get("reason") or f"answers after {entries[name]['start_s']:.0f} s"
            print(f"{precision} {name}: {said}", flush=True)
        lacks = {(n, w): why for n, entry in entries.items() for w, why in entry.get("lacks", {}).items()}
        shape = Shape(prompt_tokens=PROMPT_WORDS)
        plan = Plan(settings.workloads, shape, settings.repeats, settings.warmups, lacks)
        rounds, refused = asyncio.run(measure(servers, plan))
        for name, server in servers.items():
            entries[name]["rounds"] = rounds[name]
            peak = server.memory().peak_mib or None  # a process that has ended holds nothing
            entries[name]["rounds"]["memory"] = [{"failed": 0, "why": None, "peak_mib": peak}]
    for name, why in refused.items():
        entries[name]["reason"] = why
    return {"engines": entries}


def _started(name: str, engine: Engine, precision: str, settings: Settings, entry: dict[str, Any]) -> Server:
    """The server, frozen; what the page says of it goes into the entry. Raises SetupError."""
    if precision not in engine.precisions:
        raise SetupError(engine.lacks[precision])
    home = settings.home(name)
    began = time.monotonic()
    engine.set_up(home)
    model = engine.convert(home, settings.checkpoint, precision)
    port = free_port()
    start = engine.start(home, model, precision, port)
    lacks = {workload: why for workload, why in engine.lacks.items() if workload in FIXED}
    entry.update(
        versions=engine.versions(home), precision=engine.precisions[precision], pools_mib=start.pools_mib,
        lacks=lacks, setup_s=time.monotonic() - began,
    )  # fmt: skip
    server = Server(start, port, settings.cores, home.folder / f"{precision}.log")
    try:
        entry["start_s"] = server.wait(START_S)
    except SetupError:
        server.stop()
        raise
    server.freeze()
    return server


@contextmanager
def _stopped_at_the_end() -> Iterator[dict[str, Server]]:
    servers: dict[str, Server] = {}
    try:
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def machine(cores: tuple[int, ...]) -> Mapping[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    model = next(line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": model,
        "cores": cores,
        "cores_in_all": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }


def _checkpoint_name() -> str:
    """Another one when the code that writes it has changed: what was made of the old one must not be used."""
    code = (Path(__file__).parents[1] / "checkpoint.py").read_bytes()
    return f"checkpoint-{hashlib.sha256(code).hexdigest()[:8]}"


def _leave(cores: tuple[int, ...]) -> None:
    """The client runs on the other cores, where there are any."""
    others = os.sched_getaffinity(0) - set(cores)
    if others:
        os.sched_setaffinity(0, others)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default=",".join(NAMES), help="(default: %(default)s)")
    parser.add_argument("--precision", default=",".join(PRECISIONS), help="(default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(FIXED), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cores", default="0,1", help="of the servers, a thread on each (default: %(default)s)"
    )
    parser.add_argument("--setup", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--quick", action="store_true", help="one round, no warm-up: does everything work?")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fovea-peers"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "peers.json")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    return args


if __name__ == "__main__":
    main()
