"""Checks that a wheel works where there is no compiler: in an empty environment, with an empty PATH.

The environment gets torch and Fovea. Then Fovea answers questions about pictures with `--kernels native`.
The kernels must come from the wheel, and nothing may be compiled. On Linux:
`python -m tools.wheels.install WHEEL`; `--python` and `--torch-index` name an interpreter and where torch is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.wheels.check import NATIVE, WheelError

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
"""Installed first and exactly: a looser request could take a CUDA build of several gigabytes."""
QUESTIONS = {
    "examples/shapes.png": "How many objects can you see?",
    "examples/sign.png": "What text is in the image?",
}
ASK = """
import sys
from fovea.cli.main import main
from fovea.kernels.native.build import compiler
assert not compiler(), "there is a compiler"
status = main(sys.argv[1:])
with open("/proc/self/maps") as maps:
    print("loaded:", *sorted({line.split()[-1] for line in maps if "fovea" in line and ".so" in line}))
sys.exit(status)
"""
"""A program that runs the command line and then prints which libraries of Fovea the process has loaded."""


def check_install(wheel: Path, interpreter: str = sys.executable, torch_index: str = "") -> str:
    """Return what happened.

    interpreter: Python of the environment. torch_index: where torch comes from; "": from PyPI.
    Raises WheelError if Fovea does not work as it should, CalledProcessError if pip fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "environment"
        subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
        python = environment / "bin" / "python"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pip += ["--constraint", str(ROOT / "constraints.txt")]
        index = ["--index-url", torch_index] if torch_index else []
        subprocess.run([*pip, *index, TORCH], check=True)
        subprocess.run([*pip, str(wheel)], check=True)
        version = subprocess.run(
            [str(python), "--version"], check=True, capture_output=True, text=True
        ).stdout
        return f"{version.strip()}: {_ask(python, Path(scratch))}"


def _ask(python: Path, scratch: Path) -> str:
    cache, nothing = scratch / "cache", scratch / "nothing"
    cache.mkdir()
    nothing.mkdir()
    variables = {"PATH": str(nothing), "HOME": str(nothing), "XDG_CACHE_HOME": str(cache)}
    told = []
    for picture, question in QUESTIONS.items():
        command = [str(python), "-c", ASK, "ask", "--kernels", "native", str(ROOT / picture), question]
        done = subprocess.run(command, env=variables, cwd=nothing, capture_output=True, text=True)
        answer, _, loaded = done.stdout.partition("loaded:")
        if done.returncode or f"/{NATIVE}/lib/" not in loaded:
            raise WheelError(f"the wheel's kernels were not used: {done.stdout}{done.stderr}")
        told.append(f"  {question} {answer.strip()}")
        told.append(f"  by {os.path.relpath(loaded.strip(), python.parents[1])}")
    if written := sorted(str(path.relative_to(cache)) for path in cache.rglob("*")):
        raise WheelError(f"something was written to the cache folder: {', '.join(written)}")
    return "\n".join(["installed without a compiler; the cache folder stayed empty", *told])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="interpreter (default: this one)")
    parser.add_argument(
        "--torch-index", default="", help="index that torch is installed from (default: PyPI)"
    )
    args = parser.parse_args()
    print(check_install(args.wheel.resolve(), args.python, args.torch_index))
    return 0


if __name__ == "__main__":
    sys.exit(main())
