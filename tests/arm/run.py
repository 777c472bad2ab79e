"""Test the C++ kernels on emulated ARM processors: `python -m tests.arm.run [--only NAME]`.

A cross-compiler compiles the kernels for every ARM instruction set. Their tests run under qemu, each on the
least processor that has the set's instructions. This tests correctness; it says nothing about speed. The
first run downloads an aarch64 user land with Python and PyTorch. The exit status is 1 if a test failed or a
set could not be tested, and 2 if something is missing on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fovea.kernels.native.instruction_sets import VARIABLE, InstructionSet, instruction_sets
from tests.arm.cpus import least
from tests.arm.user_land import ROOT, SetupError, command, environment, prepare, processors

TESTS = tuple(f"tests/kernels/test_{name}.py" for name in ("native", "quantized", "pictures"))
FOLDER = Path(os.environ.get("FOVEA_ARM_FOLDER") or Path.home() / ".cache" / "fovea-arm")
SETS = tuple(each for each in instruction_sets() if each.machine == "aarch64")
LIMIT_S = 1800
"""Seconds after which the tests of one instruction set are stopped."""
SPECIAL = ("sdot", "usdot", "usmmla", "bfdot", "bfmmla")
"""Instructions that plain NEON lacks, for dot products and matrix products of bytes and of bf16."""
COMPILE = """
import logging
from fovea.kernels.native import build
logging.basicConfig(format="%(message)s")
library = build.library()
print(library._name if library else "")
"""
"""A program for the emulated processor that compiles the kernels and prints the library's path.

It starts the cross-compiler, which runs as an ordinary program of the machine below.
"""


@dataclass(frozen=True)
class Row:
    """The result of one instruction set. `problem` is empty if all went well."""

    name: str
    cpu: str
    passed: int
    skipped: int
    failed: int
    seconds: float
    problem: str

    def __str__(self) -> str:
        counts = f"{self.passed:4} passed, {self.skipped:3} skipped, {self.failed:3} failed"
        return f"{self.name:14} {self.cpu:30} {counts}, {self.seconds:5.0f} s  {self.problem or 'ok'}"


def main() -> int:
    args = _arguments()
    folder = args.folder.resolve()
    rows = []
    try:
        prepare(folder)
        available = processors(folder)
        for each in SETS:
            if not args.only or each.name in args.only:
                rows.append(test(each, least(each.needs, available), folder, args.pytest))
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n" + "\n".join(map(str, rows)))
    return 1 if any(row.problem for row in rows) else 0


def test(instructions: InstructionSet, cpu: str, folder: Path, options: list[str]) -> Row:
    """Compile the kernels for one instruction set, and run their tests on one processor.

    options: more options for pytest.
    """
    print(f"\n{instructions.name} on {cpu}: {instructions.title}", flush=True)
    python = command(folder, cpu)
    variables = environment(folder, cpu) | {VARIABLE: instructions.name}
    start = time.monotonic()

    def row(passed: int, skipped: int, failed: int, problem: str) -> Row:
        seconds = time.monotonic() - start
        return Row(instructions.name, cpu, passed, skipped, failed, seconds, problem)

    made = subprocess.run(
        [*python, "-c", COMPILE], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=False
    )
    library = made.stdout.strip()
    if made.returncode or not library:
        return row(0, 0, 0, "the kernels cannot be compiled or loaded")
    print(f"compiled in {time.monotonic() - start:.0f} s: {library}", flush=True)
    print(f"special instructions in the library: {_special(library)}", flush=True)
    report = folder / "state" / f"{instructions.name}.xml"
    report.unlink(missing_ok=True)
    pytest = ["-m", "pytest", "-q", "--tb=short", "-pno:cacheprovider", f"--junit-xml={report}"]
    status = _run([*python, *pytest, *TESTS, *options], variables)
    if status is None:
        return row(0, 0, 0, f"stopped after {LIMIT_S} s")
    if not report.exists():
        return row(0, 0, 0, f"pytest ended with status {status} and no report")
    passed, skipped, failed = _counts(report)
    return row(passed, skipped, failed, "" if status == 0 and passed else "tests failed")


def _special(library: str) -> str:
    """Return how often a library has each instruction of SPECIAL. A set without its own is no gain."""
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "--disassemble", "--no-show-raw-insn", library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    counts = Counter(re.findall(rf"\t({'|'.join(SPECIAL)})\b", listing))
    return ", ".join(f"{counts[name]} {name}" for name in SPECIAL)


def _run(arguments: list[str], variables: dict[str, str]) -> int | None:
    """Return the status of a program; None: it was stopped. Its children do not outlive it."""
    process = subprocess.Popen(arguments, cwd=ROOT, env=variables, start_new_session=True)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counts(report: Path) -> tuple[int, int, int]:
    """Return the numbers of tests that passed, were skipped, and failed."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return total - skipped - failed, skipped, failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.arm.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [each.name for each in SETS]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)}; may be repeated"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=FOLDER,
        help=f"where the user land is (default: FOVEA_ARM_FOLDER or {FOLDER})",
    )
    parser.add_argument(
        "pytest", nargs="*", metavar="OPTION", help="options of pytest behind --, for example: -- -x -k chunk"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
