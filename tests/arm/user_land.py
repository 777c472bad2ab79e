"""An aarch64 user land for qemu: Debian's Python 3.11, and PyTorch and pytest from PyPI.

Nothing is installed on this machine and nothing needs root. apt downloads and verifies Debian's packages
with lists of its own, and dpkg-deb unpacks them; pip unpacks wheels for the other architecture. The result
is complete or absent: it is made in a scratch folder that is renamed at the end.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.arm.cpus import CPUS, PROBE, cpuinfo, features

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
"""Programs that this machine must have, and the Debian packages that they are in."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCE = f"deb [arch=arm64 signed-by={KEYRING}] http://deb.debian.org/debian bookworm main\n"
DEBIAN = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
TORCH = "2.9.1"
"""The last version that runs on ARMv8.0: from 2.10 on its wheel uses the atomics of ARMv8.1 without asking.

From 2.11 on, PyPI's wheel for aarch64 is a CUDA build of 420 MB and more; this one has 104 MB. It is older
than those that Fovea supports, which the kernels and their tests do not notice.
"""
WHEELS = (
    "filelock", "fsspec", "Jinja2", "MarkupSafe", "mpmath", "networkx", "sympy", "typing_extensions", "numpy",
    "pillow", "pytest", "iniconfig", "packaging", "pluggy", "Pygments", "pytest-asyncio", "hypothesis",
    "sortedcontainers",
)  # fmt: skip
"""What torch, pytest and the tests of kernels import, in the versions of constraints.txt.

pip must not resolve dependencies here: it judges them for the machine on which it runs and would download
the CUDA packages of torch for x86-64.
"""
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014")


class SetupError(Exception):
    """The user land cannot be made. The message says what is missing and how to get it."""


def prepare(folder: Path) -> None:
    """Make the user land in `folder` unless it is there and up to date (160 MB to download, 700 MB on disk).

    Raises SetupError.
    """
    _check_tools()
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == _digest():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        made = Path(scratch)
        print(f"making an aarch64 user land in {folder}: Debian's packages ...", flush=True)
        _unpack_debian(made / "debian", made / "apt")
        print("... and wheels", flush=True)
        _unpack_wheels(made / "site", made / "constraints.txt")
        stamp.unlink(missing_ok=True)
        for name in ("debian", "site"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (made / name).rename(folder / name)
    shutil.rmtree(folder / "cpus", ignore_errors=True)
    stamp.write_text(_digest())


def command(folder: Path, cpu: str) -> list[str]:
    """Return the command that starts Python on the emulated processor."""
    prefix = folder / "cpus" / cpu
    return ["qemu-aarch64", "-L", str(prefix), "-cpu", cpu, str(folder / "debian/usr/bin/python3.11")]


def environment(folder: Path, cpu: str) -> dict[str, str]:
    """Return the environment for `command`. All that Python and the tests write goes below `folder`.

    G_SLICE: qemu before version 8 allocates in pools of glib, which have locks. If a thread translates code
    while another one forks, the child waits for such a lock forever. malloc frees its locks in a child.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_"))}
    state = folder / "state" / cpu
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "site", ROOT / "src", ROOT))),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "XDG_CACHE_HOME": str(state),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(state / "hypothesis"),
        "PYTHONUNBUFFERED": "1",
        "CXX": "aarch64-linux-gnu-g++",
        "G_SLICE": "always-malloc",
    }


def processors(folder: Path) -> dict[str, frozenset[str]]:
    """Return the features of each emulated processor, and give each a prefix with its own /proc/cpuinfo.

    qemu looks up every absolute path below its prefix first.
    """
    available = {}
    for cpu in CPUS:
        prefix = folder / "cpus" / cpu
        (prefix / "proc").mkdir(parents=True, exist_ok=True)
        for name in ("lib", "usr"):
            link = prefix / name
            if not link.is_symlink():
                link.symlink_to(folder / "debian" / name)
        printed = _run([*command(folder, cpu), "-c", PROBE], environment(folder, cpu))
        hwcap, hwcap2 = map(int, printed.split())
        available[cpu] = features(hwcap, hwcap2)
        (prefix / "proc" / "cpuinfo").write_text(cpuinfo(available[cpu]))
    return available


def _check_tools() -> None:
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if not KEYRING.exists():
        missing.append("debian-archive-keyring")
    if missing:
        raise SetupError(
            f"missing: Debian packages {', '.join(missing)}; install them with: "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
        )


def _digest() -> str:
    """Return a digest of everything that decides what is downloaded."""
    return hashlib.sha256("\n".join((SOURCE, *DEBIAN, *_requirements())).encode()).hexdigest()


def _requirements() -> list[str]:
    """Return the wheels with their versions. Raises SetupError if constraints.txt lacks one."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    by_name = {_normal(name): version for name, version in pins.items()}
    unknown = [name for name in WHEELS if _normal(name) not in by_name]
    if unknown:
        raise SetupError(f"constraints.txt has no version of {', '.join(unknown)}")
    return [f"torch=={TORCH}", *(f"{name}=={by_name[_normal(name)]}" for name in WHEELS)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _unpack_debian(target: Path, scratch: Path) -> None:
    for name in ("lists/partial", "archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(SOURCE)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the user _apt could not write into this folder
        "Dir::State": str(scratch),
        "Dir::State::status": str(scratch / "status"),
        "Dir::Cache": str(scratch),
        "Dir::Etc::sourcelist": str(scratch / "sources.list"),
        "Dir::Etc::sourceparts": "/dev/null",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run([*apt, "update"])
    _run([*apt, "install", "--yes", "--download-only", *DEBIAN])
    target.mkdir()
    for package in sorted((scratch / "archives").glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(target)])


def _unpack_wheels(target: Path, scratch: Path) -> None:
    scratch.write_text("\n".join(_requirements()))
    platforms: Iterable[str] = (f"--platform={tag}_aarch64" for tag in GLIBC_TAGS)
    options = ["--no-deps", "--no-compile", "--only-binary=:all:", "--python-version=3.11", *platforms]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    _run([*pip, *options, f"--target={target}", f"--requirement={scratch}"])


def _run(arguments: list[str], environment: dict[str, str] | None = None) -> str:
    """Return what a program prints. Raises SetupError with its messages if it fails."""
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SetupError(
            f"{' '.join(arguments[:3])} ... ended with status {ended.returncode}:\n{ended.stderr[-3000:]}"
        )
    return ended.stdout
