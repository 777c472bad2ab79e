"""Measure `fovea batch --cluster local` on a folder of many tiny images: speed, and memory over time.

    python benchmarks/cluster_batch.py --images 1000000
    python benchmarks/cluster_batch.py --images 200000 --engine simulate

The folder has hard links to 1,000 distinct PNG files of 32 x 32 pixels. The engine is a stub that answers at
once (benchmarks/gateway/backend.py), or `fovea serve --simulate`, whose scheduler is the real one. The run is
checked: each image must have exactly one line. Needs the extra `cluster`. Prints a table, and JSON as its
last line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
DISTINCT = 1000
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
MIB = 1024**2
POLL_S = 1.0
WORKER = b"ray::MapWorker"


@dataclass
class Row:
    """The state of the run when a share of the images was answered. Memory in MiB.

    images: that are answered. per_s: images per second since the first file of answers.
    driver, worker: resident memory of the command, and of the largest worker.
    whole: proportional share of the command and all of Ray's processes, each page counted once.
    """

    images: int
    per_s: float
    driver: int
    worker: int
    whole: int


def make_images(folder: Path, count: int) -> None:
    """Fill a folder with images, of which DISTINCT are different."""
    for number in range(count):
        target = folder / f"{number:07d}.png"
        if number < DISTINCT:
            data = io.BytesIO()
            color = (number % 251, number // 251 * 60, number % 13 * 19)
            Image.new("RGB", (32, 32), color).save(data, "png")
            target.write_bytes(data.getvalue())
        else:
            os.link(folder / f"{number % DISTINCT:07d}.png", target)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine(kind: str) -> Iterator[str]:
    """Run an engine, and yield its URL."""
    port = free_port()
    if kind == "stub":
        command = [sys.executable, str(HERE / "gateway" / "backend.py"), "--port", str(port)]
    else:
        command = [sys.executable, "-m", "fovea.cli.main", "serve", "--simulate", "--port", str(port),
                   "--max-queue", "4096", "--log-level", "error"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_listening(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.1)
    raise SystemExit("the engine did not start")


def descendants(root: int) -> list[int]:
    """Return a process and all that it started."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                )
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def memory(pid: int) -> tuple[int, int, bytes]:
    """Return resident and proportional memory of a process in bytes, and its command; zeros if it ended."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes["Rss"], sizes["Pss"], Path(f"/proc/{pid}/cmdline").read_bytes()
    return 0, 0, b""


def measure(pid: int, done: int, first: int, seconds: float) -> Row:
    """Return the state of the command. first: images that were answered `seconds` ago."""
    found = {process: memory(process) for process in descendants(pid)}
    workers = [rss for rss, _, command in found.values() if command.startswith(WORKER)]
    whole = sum(pss for _, pss, _ in found.values())
    driver = found[pid][0]
    return Row(done, (done - first) / seconds, driver // MIB, max(workers, default=0) // MIB, whole // MIB)


def run(words: Sequence[str], out: Path, images: int, block: int) -> list[Row]:
    """Run the command, and return its state at each of SHARES, the last one when all files are there."""
    rows: list[Row] = []
    begin = first = 0.0
    process = subprocess.Popen([sys.executable, "-m", "fovea.cli.main", "batch", *words])
    latest: Row | None = None
    while process.poll() is None:
        done = min(block * count_parts(out), images)
        if done and not begin:
            begin, first = time.monotonic(), done  # Ray has started, and the images are listed
        due = len(rows) < len(SHARES) and done >= SHARES[len(rows)] * images
        if done > (rows[-1].images if rows else first) and (due or done > 0.95 * images):
            row = measure(process.pid, done, first, time.monotonic() - begin)
            if not row.worker and latest:  # the workers have ended already
                row = replace(latest, images=row.images, per_s=row.per_s)
            latest = row
            if due:
                rows.append(row)
                print(row_text(row, images), flush=True)
        time.sleep(POLL_S)
    if process.returncode or not rows:
        raise SystemExit(f"the command ended with {process.returncode}")
    return rows


def count_parts(out: Path) -> int:
    return sum(name.startswith("part-") for name in os.listdir(out)) if out.exists() else 0


def row_text(row: Row, images: int) -> str:
    return (
        f"| {row.images / images:.0%} | {row.images:,} | {row.per_s:,.0f} | {row.driver} | {row.worker} | "
        f"{row.whole} |"
    )


def check(out: Path, images: int) -> None:
    """Check that each image has exactly one line, and an answer. Raises SystemExit."""
    lines, names = 0, set()
    for part in sorted(out.glob("part-*.jsonl")):
        for line in part.open():
            body = json.loads(line)
            lines += 1
            names.add(body["id"])
            if body["line"] != lines or "error" in body:
                raise SystemExit(f"{part}: {line}")
    if lines != images or len(names) != images:
        raise SystemExit(f"{lines} lines of {len(names)} images, not {images}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--engine", choices=("stub", "simulate"), default="stub")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument(
        "--folder", type=Path, help="where images and answers are put (default: a temporary one)"
    )
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="fovea-batch-") as name,
        engine(args.engine) as url,
    ):
        source, out = Path(name) / "images", Path(name) / "answers"
        source.mkdir()
        make_images(source, args.images)
        words = [str(source), str(out), "--cluster", "local", "--url", url, "--prompt", "What is it?",
                 "--max-tokens", "4", "--workers", str(args.workers), "--block", str(args.block)]  # fmt: skip
        print("| answered | images | images/s | command, MiB | worker, MiB | all of Ray, MiB |")
        print("|---|---|---|---|---|---|")
        rows = run(words, out, args.images, args.block)
        check(out, args.images)
    print(json.dumps({"images": args.images, "engine": args.engine, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
