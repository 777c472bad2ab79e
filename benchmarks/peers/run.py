"""Compare Fovea with vLLM, OpenVINO GenAI, llama.cpp and transformers: install, start and measure them.

    python benchmarks/peers/run.py [--engines fovea,vllm] [--precision bf16,int8,int4] [--repeats 3] [--quick]
                                   [--instructions all,avx2]

The first run installs each peer in a venv of its own under --cache, which takes an hour and 8 GB; later runs
start at once. For a peer that cannot be installed or started, the page gives the reason. With
--instructions avx2 the engines run as on a machine without AVX-512. The last line is JSON.
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

from earlier import earlier
from instructions import ALL, AVX2, CHOICES, FILES, is_wide, page_of, pages
from measure import Plan, measure
from process import Server, free_port
from servers import NAMES, load, names
from servers.base import Engine, Home, SetupError

import page
from checkpoint import write_checkpoint
from fovea.bench.settings import FIXED, Shape
from fovea.core.hardware import cpu_flags

TEXT_TOKENS, PROMPT_WORDS = 56, 37
"""Text tokens of a prompt, and its words; template, image markers and a unique mark are the rest."""
RESULTS = Path(__file__).parents[1] / "results"
START_S = 1200.0
"""Longest time of a start in seconds; the first start of vLLM compiles for minutes."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    cache: folder in which the engines are installed.
    checkpoint: folder of the checkpoint.
    cores: cores of the servers.
    repeats: rounds of each workload that count.
    warmups: rounds of each workload before those.
    workloads: names of workloads.
    instructions: what the engines may use, `all` or `avx2`.
    """

    cache: Path
    checkpoint: Path
    cores: tuple[int, ...]
    repeats: int
    warmups: int
    workloads: tuple[str, ...]
    instructions: str

    def engine(self, name: str) -> tuple[Engine, Home]:
        """An engine and its folder."""
        engine = load(name, self.instructions)
        return engine, Home(self.cache / (engine.folder or name), self.cores)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # run the clean-up that stops the servers
    cores = tuple(int(core) for core in args.cores.split(","))
    _leave_cores(cores)
    cache = args.cache.expanduser().resolve()
    checkpoint = write_checkpoint(cache / _checkpoint_name())
    precisions = args.precision.split(",")
    for instructions in args.pages:
        engines = args.engines.split(",") if args.engines else list(names(instructions))
        settings = Settings(
            cache, checkpoint, cores, args.repeats, 0 if args.quick else 1,
            tuple(args.workloads.split(",")), instructions,
        )  # fmt: skip
        if args.setup:
            set_up(engines, precisions, settings)
        else:
            out = args.out or RESULTS / FILES[page_of(instructions, cpu_flags())]
            run(engines, precisions, settings, out, args.add)


def run(names: list[str], precisions: list[str], settings: Settings, out: Path, add: bool) -> None:
    """Compare the engines, and write the results after each precision.

    add: whether the results that `out` has of other precisions stay there.
    """
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(settings.cores),
        "instructions": page_of(settings.instructions, cpu_flags()),
        "limited": settings.instructions == AVX2 and is_wide(cpu_flags()),
        "checkpoint_mib": (settings.checkpoint / "model.safetensors").stat().st_size / 2**20,
        "shape": {"visual_tokens": 256, "text_tokens": TEXT_TOKENS, "output_tokens": 64},
        "repeats": settings.repeats,
        "precisions": {},
    }
    if add and out.exists():
        results["precisions"] = earlier(json.loads(out.read_text()), results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for precision in precisions:
        results["precisions"][precision] = {
            **compare(names, precision, settings),
            "date": results["date"],
            "commit": results["machine"]["commit"],
        }
        out.write_text(json.dumps(results, indent=1) + "\n")
        page.write(results, out)
    print(page.page(results))
    print(json.dumps(results))


def set_up(names: list[str], precisions: list[str], settings: Settings) -> None:
    """Install the engines and convert the checkpoint for them; print the versions or the error."""
    for name in names:
        (engine, home), started = settings.engine(name), time.monotonic()
        try:
            engine.set_up(home)
            for precision in set(precisions) & set(engine.precisions):
                engine.convert(home, settings.checkpoint, precision)
            outcome = ", ".join(f"{what} {version}" for what, version in engine.versions(home).items())
        except SetupError as error:
            outcome = str(error)
        print(f"{name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)


def compare(names: list[str], precision: str, settings: Settings) -> dict[str, Any]:
    """Measure all engines that have the precision.

    Returns their entries of the results; others with the reason.
    """
    entries: dict[str, dict[str, Any]] = {}
    with _stop_at_the_end() as servers:
        for name in names:
            engine, home = settings.engine(name)
            entries[name] = {"title": engine.title}
            try:
                servers[name] = _start(name, engine, home, precision, settings, entries[name])
            except SetupError as error:
                entries[name]["reason"] = str(error)
            outcome = entries[name].get("reason") or f"answers after {entries[name]['start_s']:.0f} s"
            print(f"{precision} {name}: {outcome}", flush=True)
        lacks = {(n, w): why for n, entry in entries.items() for w, why in entry.get("lacks", {}).items()}
        shape = Shape(prompt_tokens=PROMPT_WORDS)
        plan = Plan(settings.workloads, shape, settings.repeats, settings.warmups, lacks)
        measured = asyncio.run(measure(servers, plan))
        for name, server in servers.items():
            entries[name]["rounds"] = measured.rounds[name]
            entries[name]["instructions"] = measured.instructions[name]
            peak = server.memory().peak_mib or None  # a process that has ended has no memory
            entries[name]["rounds"]["memory"] = [{"failed": 0, "why": None, "peak_mib": peak}]
    for name, why in measured.errors.items():
        entries[name]["reason"] = why
    return {"engines": entries}


def _start(
    name: str, engine: Engine, home: Home, precision: str, settings: Settings, entry: dict[str, Any]
) -> Server:
    """Start and freeze a server, and add versions, settings and times to its entry. Raises SetupError."""
    if precision not in engine.precisions:
        raise SetupError(engine.lacks[precision])
    started = time.monotonic()
    engine.set_up(home)
    model = engine.convert(home, settings.checkpoint, precision)
    port = free_port()
    start = engine.start(home, model, precision, port)
    lacks = {workload: why for workload, why in engine.lacks.items() if workload in FIXED}
    entry.update(
        versions=engine.versions(home), precision=engine.precisions[precision], pools_mib=start.pools_mib,
        lacks=lacks, setup_s=time.monotonic() - started, limit=engine.limit,
    )  # fmt: skip
    log = home.folder / f"{name}-{precision}-{settings.instructions}.log"
    server = Server(start, port, settings.cores, log)
    try:
        entry["start_s"] = server.wait(START_S)
    except SetupError:
        server.stop()
        raise
    server.freeze()
    return server


@contextmanager
def _stop_at_the_end() -> Iterator[dict[str, Server]]:
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
    """A name that changes with the code of the checkpoint, so that old conversions are not reused."""
    code = (Path(__file__).parents[1] / "checkpoint.py").read_bytes()
    return f"checkpoint-{hashlib.sha256(code).hexdigest()[:8]}"


def _leave_cores(cores: tuple[int, ...]) -> None:
    """Move this process, the client, to the other cores, if there are any."""
    others = os.sched_getaffinity(0) - set(cores)
    if others:
        os.sched_setaffinity(0, others)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", help=f"(default: {','.join(NAMES)}, and vllm32 for avx2)")
    parser.add_argument("--precision", default=",".join(page.PRECISIONS), help="(default: %(default)s)")
    parser.add_argument(
        "--add", action="store_true", help="keep the other precisions of the results that were written before"
    )
    parser.add_argument("--workloads", default=",".join(FIXED), help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cores", default="0,1", help="cores of the servers, with one thread each (default: %(default)s)"
    )
    parser.add_argument("--setup", action="store_true", help="only install and convert")
    parser.add_argument("--quick", action="store_true", help="one round, no warm-up, to check that it works")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fovea-peers"))
    parser.add_argument(
        "--instructions", default=ALL, metavar=",".join(CHOICES),
        help="all: what the machine has; avx2: every engine is kept to AVX2; both write one page each, and a "
        "machine with AMX writes another one for `all`. On a "
        "machine without AVX-512 they are the same page, that of avx2 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file of the results (default: peers.json, peers_avx2.json or peers_amx.json)",
    )
    args = parser.parse_args()
    try:
        args.pages = pages(args.instructions.split(","), cpu_flags())
    except ValueError as error:
        parser.error(str(error))
    if args.out and len(args.pages) > 1:
        parser.error("--out names one file, and --instructions asks for two pages")
    if args.quick:
        args.repeats = 1
    return args


if __name__ == "__main__":
    main()
