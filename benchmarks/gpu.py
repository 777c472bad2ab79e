"""Test on CUDA, then measure speed against hardware limits and transformers.

    make gpu                                   # or: python3 benchmarks/gpu.py
    python3 benchmarks/gpu.py correctness      # at most 190 s
    python3 benchmarks/gpu.py numbers          # at most 390 s

Without an argument it runs both on a machine with CUDA; on another it prints the two commands to run on one.
The tree needs no installation. Wheels in .gpu-wheels (see tools/gpu_wheels.py) are unpacked for the run.
Each result is written to $OUT (default: out) at once, and a page at the end: gpu-correctness.md, or
gpu-numbers.md. A step of the measurement that fails or takes too long does not end the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from gpu_page import IN_MEMORY, STEPS, Outcome, Step, correctness_page, numbers_page

ROOT = Path(__file__).resolve().parent.parent
REHEARSAL = os.environ.get("FOVEA_GPU_REHEARSAL") == "1"
WHEELS = ROOT / ".gpu-wheels"
LIMITS = {"correctness": 190, "numbers": 390}
"""Seconds of each command."""
RELOAD = 60
"""Additional seconds for a step in a new process, which has to load the model again."""
RESERVE = 15
"""Seconds of each command for its start and its page."""
FILES = ("kernels", "speculation", "structured", "sampling", "logits", "cuda", "memory", "reduce", "observe")
"""Test files, the most important first."""
COMMANDS = """torch sees no CUDA device here. Copy this tree to a machine with CUDA.
`make gpu` runs both parts there.

If that machine has no network, download llguidance here, and copy the folder .gpu-wheels along:

    python3 -m tools.gpu_wheels

To run the parts one at a time, run these in the tree there. They write into the folder $OUT:

{commands}
"""


def environment(site: str) -> dict[str, str]:
    """Return the variables of child processes. site: folder of unpacked wheels."""
    paths = [str(ROOT / "src"), str(ROOT), site, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_INTERPRET": str(int(REHEARSAL)),
        **({"CUDA_VISIBLE_DEVICES": ""} if REHEARSAL else {}),
    }


def unpack(wheels: Path, site: str) -> None:
    """Unpack wheels into a folder. If pip refuses them, it says why, and the run goes on without them."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if files:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--disable-pip-version-check", "--target", site, *files], check=False)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def correctness(out: Path, deadline: float, workers: int, variables: dict[str, str]) -> int:
    """Run tests/gpu and write their page. Returns 0 if all passed."""
    results, log = out / "gpu-tests.jsonl", out / "gpu-pytest.txt"
    results.unlink(missing_ok=True)
    # The project's own options name plugins that this machine may lack.
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-o", "addopts=", "-W", "default"]
    command += ["-p", "tests.support.gpu_results", "-o", "faulthandler_timeout=60", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    if find_spec("xdist") is not None:
        command += ["-n", str(workers), "--maxschedchunk", "1"]
    command += [f"tests/gpu/test_{name}.py" for name in FILES]
    variables = {**variables, "FOVEA_GPU_RESULTS": str(results.resolve())}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
            told = f"pytest ended with exit code {code}"
        except subprocess.TimeoutExpired:
            code, told = 124, "the time ran out"
        end(process)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    collected = next((line["collected"] for line in lines if "collected" in line), [])
    tests = [line for line in lines if "test" in line]
    text = correctness_page(*titles(), told, collected, tests)
    if not collected:
        text += "\nNo test was collected:\n\n" + log.read_text()[-4000:]
    (out / "gpu-correctness.md").write_text(text)
    print(text)
    return code


class Speed:
    """A process that measures steps. A thread reads its lines, so that waiting for one can end."""

    def __init__(self, script: Path, steps: Sequence[str], log: Path, variables: dict[str, str]) -> None:
        command = [sys.executable, str(script), *steps]
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def _read(self, log: Path) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with log.open("a") as file:
                    file.write(line)
                if line.startswith("{"):
                    self._lines.put(line)
        self._lines.put("")

    def end(self) -> None:
        """End the process and the thread."""
        end(self.process)
        self._reader.join()

    def outcome(self, step: str, seconds: float) -> Outcome:
        """Wait for the outcome of a step."""
        started = time.monotonic()
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            late = f"it took more than {seconds:.0f} s"
            return Outcome(step, time.monotonic() - started, late, ended=True)
        if not line:
            code = self.process.wait()
            return Outcome(
                step, time.monotonic() - started, f"its process ended with code {code}", ended=True
            )
        return Outcome(**json.loads(line))


def run_steps(
    steps: Sequence[Step],
    deadline: float,
    log: Path,
    results: Path,
    variables: dict[str, str],
    script: Path = ROOT / "benchmarks/gpu_speed.py",
) -> list[Outcome]:
    """Run the steps in one process; if it ends, the rest in a new one. Each outcome is written at once."""
    outcomes: list[Outcome] = []
    speed: Speed | None = None
    for number, step in enumerate(steps):
        left = deadline - time.monotonic()
        if left < 1:
            outcome = Outcome(step.name, 0.0, "no time was left")
        else:
            allowed = step.seconds
            if speed is None:
                speed = Speed(script, [each.name for each in steps[number:]], log, variables)
                allowed += RELOAD if number else 0
            outcome = speed.outcome(step.name, min(left, allowed))
        if outcome.ended and speed is not None:
            speed.end()
            speed = None
        outcomes.append(outcome)
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(f"{outcome.step}: {outcome.seconds:.1f} s {outcome.error or outcome.measured}", flush=True)
    if speed is not None:
        speed.end()
    return outcomes


def numbers(out: Path, deadline: float, variables: dict[str, str]) -> int:
    """Run the steps of gpu_speed.py and write their page. Returns 0 if all gave figures."""
    log, results = out / "gpu-speed.txt", out / "gpu-numbers.jsonl"
    for file in (log, results):
        file.unlink(missing_ok=True)
    try:
        outcomes = run_steps(STEPS, deadline, log, results, variables)
    finally:
        shutil.rmtree(IN_MEMORY, ignore_errors=True)
    text = numbers_page(*titles(), outcomes)
    (out / "gpu-numbers.md").write_text(text)
    print(text)
    return int(any(outcome.error for outcome in outcomes))


def cuda() -> bool:
    """Return whether torch is installed and sees a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def titles() -> tuple[str, str]:
    """Return the title of a page, and its line about versions."""
    import torch
    import transformers

    name = "A rehearsal without a GPU" if REHEARSAL else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {datetime.date.today().isoformat()}", f"{versions}, CUDA {torch.version.cuda}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=LIMITS)
    parser.add_argument("--workers", type=int, default=8, help="processes that run tests (default: 8)")
    parser.add_argument("--seconds", type=float, help="time limit instead of the part's own")
    args = parser.parse_args()
    started = time.monotonic()
    if not REHEARSAL and not cuda():
        if args.part:
            print("benchmarks/gpu.py: torch sees no CUDA device; nothing was run", file=sys.stderr)
            return 2
        lines = [f"    timeout {limit} python3 benchmarks/gpu.py {part}" for part, limit in LIMITS.items()]
        print(COMMANDS.format(commands="\n".join(lines)))
        return 0
    out = Path(os.environ.get("OUT") or "out")
    out.mkdir(parents=True, exist_ok=True)
    code = 0
    with tempfile.TemporaryDirectory() as site:
        unpack(WHEELS, site)
        for part in [args.part] if args.part else list(LIMITS):
            deadline = started + (args.seconds or LIMITS[part]) - RESERVE
            if part == "correctness":
                code = correctness(out, deadline, args.workers, environment(site)) or code
            else:
                code = numbers(out, deadline, environment(site)) or code
            started = time.monotonic()
    return code


if __name__ == "__main__":
    sys.exit(main())
