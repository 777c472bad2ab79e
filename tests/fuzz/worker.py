"""Fuzzes one target in a process of its own: `python -m tests.fuzz.worker NAME SECONDS FOLDER`.

With atheris the inputs are guided by coverage, else by the kinds of refusals. An exception is written to the
folder and the run goes on; an input that kills the process is in the file `NAME.running`. What was found so
far is in `NAME.json`, because libFuzzer ends the process without Python's usual end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import resource
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.mutate import Mutator
from tests.fuzz.table import Target, load

CPU_S = 3.0
"""Most processor seconds of one input. All are smaller than 16 KiB, so less than a tenth is usual."""
MEMORY = 12 << 30
HANG_S = 30
REPORT_S = 0.5


class Session:
    """Runs inputs of a target, and writes findings.

    runs: inputs so far. findings: number of findings by exception type and place.
    """

    def __init__(self, target: Target, folder: Path) -> None:
        self.runs = 0
        self.findings: dict[str, int] = {}
        self._target = target
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._running = (folder / f"{target.name}.running").open("wb", buffering=0)
        self._next_report = 0.0

    def run(self, data: bytes) -> None:
        self.runs += 1
        self._running.seek(0)
        self._running.write(data)
        self._running.truncate()
        started = time.thread_time()
        try:
            self._target.run(data)
        except Exception as error:  # noqa: BLE001 - every exception is a finding
            self._found(data, _place(error), traceback.format_exc())
        seconds = time.thread_time() - started
        if seconds > CPU_S:
            self._found(data, "slow", f"{seconds:.1f} processor seconds")
        if time.monotonic() > self._next_report:
            self.report()

    def _found(self, data: bytes, kind: str, details: str) -> None:
        self.findings[kind] = self.findings.get(kind, 0) + 1
        if self.findings[kind] > 1:
            return
        name = f"{self._target.name}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"
        (self._folder / name).write_bytes(data)
        (self._folder / f"{name}.txt").write_text(f"{kind}\n{len(data)} bytes: {data!r:.2000}\n\n{details}")

    def report(self) -> None:
        """Write the figures so far for the process that started this one."""
        self._next_report = time.monotonic() + REPORT_S
        figures = {"runs": self.runs, "findings": self.findings}
        (self._folder / f"{self._target.name}.json").write_text(json.dumps(figures))


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def fuzz(session: Session, target: Target, seconds: float, grown: Path) -> None:
    """Mutate without coverage."""
    from tests.fuzz.refusals import take

    stored = [path.read_bytes() for path in sorted(grown.iterdir())]
    mutator = Mutator(
        [*target.seeds(), *target.corpus(), *stored], target.words, target.longest, time.time_ns()
    )
    outcomes = set()
    for data in tuple(mutator.corpus):
        session.run(data)
        outcomes.add(take())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutator.next()
        session.run(data)
        outcome = take()
        if outcome not in outcomes:
            outcomes.add(outcome)
            mutator.corpus.append(data)
            (grown / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def fuzz_with_atheris(session: Session, target: Target, seconds: float, grown: Path, folder: Path) -> None:
    """Let libFuzzer choose the inputs. It ends the process."""
    import atheris

    from tests.fuzz.refusals import take

    for number, data in enumerate((*target.seeds(), *target.corpus())):
        (grown / f"seed-{number:03}").write_bytes(data)
        session.run(data)
    words = folder / f"{target.name}.words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words if len(word) < 64))

    def one(data: bytes) -> None:
        session.run(data)
        take()

    options = {
        "max_total_time": max(1, round(seconds)), "max_len": target.longest, "timeout": HANG_S,
        "rss_limit_mb": MEMORY >> 20, "artifact_prefix": f"{folder}/{target.name}-", "dict": words,
        "print_final_stats": 1, "verbosity": 1,
    }  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(grown)], one)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def main() -> None:
    name, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    guided = importlib.util.find_spec("atheris") is not None
    resource.setrlimit(
        resource.RLIMIT_AS, (resource.RLIM_INFINITY if guided else MEMORY, resource.RLIM_INFINITY)
    )
    with contextlib.ExitStack() as stack:
        if guided:
            import atheris

            stack.enter_context(atheris.instrument_imports(include=["fovea"], enable_loader_override=False))
        target = load(name)
    grown = folder / "corpus" / name
    grown.mkdir(parents=True, exist_ok=True)
    session = Session(target, folder)
    if guided:
        fuzz_with_atheris(session, target, seconds, grown, folder)
    else:
        fuzz(session, target, seconds, grown)
        session.report()


if __name__ == "__main__":
    main()
