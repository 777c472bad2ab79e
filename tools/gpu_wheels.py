"""Download packages for a GPU machine without a network, as wheels into .gpu-wheels.

    python3 -m tools.gpu_wheels [PACKAGE ...] [--python 3.12]

The default is llguidance, which structured output needs. Versions are those of constraints.txt. Dependencies
are not downloaded: name each one that the GPU machine lacks. `benchmarks/gpu.py` unpacks the folder on
the other machine (Linux, x86-64), which must have Python of that version, torch with CUDA and transformers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu-wheels"
PACKAGES = ("llguidance",)
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
"""Minor versions of glibc whose wheels are accepted, newest first. pip wants each named."""
MAX_MIB = 24
"""Largest size of the folder, so that the tree stays small enough to copy."""


def pinned(packages: Sequence[str], constraints: str) -> list[str]:
    """Return NAME==VERSION for each package. constraints: text of constraints.txt.

    Raises SystemExit if one has no version there.
    """
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, re.MULTILINE))
    missing = [name for name in packages if name not in versions]
    if missing:
        raise SystemExit(f"constraints.txt has no version of {', '.join(missing)}")
    return [f"{name}=={versions[name]}" for name in packages]


def command(packages: Sequence[str], python: str, folder: Path) -> list[str]:
    """Return the call of pip that downloads one wheel for each package."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "--platform=manylinux2014_x86_64"
    ]
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms,
        f"--dest={folder}", *packages,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), metavar="PACKAGE")
    parser.add_argument("--python", default="3.12", help="version of Python there (default: 3.12)")
    args = parser.parse_args()
    packages = pinned(args.packages, (ROOT / "constraints.txt").read_text())
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run(command(packages, args.python, FOLDER), check=True)
    wheels = sorted(FOLDER.glob("*.whl"))
    mib = sum(wheel.stat().st_size for wheel in wheels) / (1 << 20)
    if mib > MAX_MIB:
        raise SystemExit(f"the wheels in {FOLDER} have {mib:.1f} MiB; at most {MAX_MIB} are accepted")
    print(f"{FOLDER}: {mib:.1f} MiB, {', '.join(wheel.name for wheel in wheels)}")


if __name__ == "__main__":
    main()
