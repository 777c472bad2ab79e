"""Run the test suite in Debian systems that have nothing but what is declared: `make test-fresh`.

    python3 -m tools.fresh [bare] [no-compiler] [servers] [--suite TARGET]

    bare         ca-certificates, make, python3, python3-venv, g++
    no-compiler  the same without g++
    servers      as bare, and then `make servers`

A system is a folder that mmdebstrap fills with the packages listed for it and what Debian itself needs. Its
home is empty, and it has no font, no program and no file of this machine. The tracked files are copied into
it, as they are now (`git add` new ones first). Installation, checks and `make TARGET` (default: test) run
there as root, in process and mount namespaces of their own, so that no process is left behind. What pip is
told on this machine (mirrors, certificates, folders of wheels) holds there, too. The exit status is that of
the first part that failed, and 77 if this machine cannot make such a system; the reason is printed.

The last lines name the processor time of each part, children included.
"""

from __future__ import annotations

import argparse
import configparser
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "out/fresh"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "make", "python3", "python3-venv")
SYSTEMS = {"bare": ("g++",), "no-compiler": (), "servers": ("g++",)}
"""Packages beside PACKAGES. Only the last one runs `make servers`."""
VARIABLES = ("TORCH_INDEX", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that are passed into the system: where torch is, and what the processor can do."""
PROGRAMS = ("mmdebstrap", "setpriv", "unshare", "chroot")
CANNOT = 77


def reason_against() -> str:
    """Return why this machine cannot make a system; "": it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs Linux and root"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{missing[0]} is not installed (Debian: apt-get install mmdebstrap util-linux coreutils)"
    namespaces = ["unshare", "--mount", "--pid", "--fork", "true"]
    if (done := subprocess.run(namespaces, capture_output=True, text=True, check=False)).returncode:
        return f"no namespaces of its own are allowed here: {done.stderr.strip()}"
    return ""


def make_base(packages: tuple[str, ...]) -> Path:
    """Return a folder with these packages and what they depend on. It is made once."""
    base = FOLDER / "-".join(("base", *packages))
    if not base.is_dir():
        unfinished = base.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        included = f"--include={','.join(packages)}"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", included, SUITE, str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(base)
    return base


def reason_against_making(systems: list[str]) -> str:
    """Return why the folders that the systems begin with cannot be made; "": they are there."""
    try:
        for name in systems:
            make_base((*PACKAGES, *SYSTEMS[name]))
    except subprocess.CalledProcessError as error:
        return f"mmdebstrap ended with exit status {error.returncode}"
    return ""


def make_system(name: str) -> Path:
    """Return the folder of a system with the tracked files of this repository, as they are now."""
    base = make_base((*PACKAGES, *SYSTEMS[name]))
    system = FOLDER / name
    shutil.rmtree(system, ignore_errors=True)
    subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--no-target-directory", str(base), str(system)], check=True
    )
    target = system / "fovea"
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for file in filter(None, listing.decode().split("\0")):
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file, follow_symlinks=False)
    for file in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(file).exists():
            shutil.copyfile(file, system / file.lstrip("/"))
    return system


def settings_of_pip() -> dict[str, str]:
    """Return what pip is told on this machine, by files and variables, without the names of the sections."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    found = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", "\n")
    return found


def mounts(system: Path) -> str:
    """Return shell commands that mount in a system what the kernel offers, and what pip reads.

    It also makes the places for the mounts, and writes pip's settings into the system, so it is called once.
    The commands run for each part, in a namespace of its own, so that the mounts end with it.
    """
    lines = ["set -e", "mount -t proc proc proc", "mount --rbind /sys sys", "mount --rbind /dev dev"]
    settings = settings_of_pip()
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    # An index in a folder refers to files beside it.
    for path in {word.removesuffix("/simple") for word in words}:
        place = system / path.lstrip("/")
        if not path.startswith("/") or not Path(path).exists() or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            place.mkdir()
        else:
            place.touch()
        lines.append(f"mount --bind {shlex.quote(path)} {shlex.quote(str(place))}")
    parser = configparser.ConfigParser(interpolation=None)
    parser["global"] = settings
    with (system / "etc/pip.conf").open("w") as file:
        parser.write(file)
    return "\n".join(lines)


def run_inside(system: Path, mounting: str, command: str) -> int:
    """Run a shell command in a system, in the repository's folder. Returns its exit status.

    mounting: from `mounts`.
    """
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    variables |= {
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
    }
    assignments = [f"{name}={value}" for name, value in variables.items()]
    inside = shlex.join(["chroot", ".", "env", "-i", *assignments, "sh", "-c", f"cd /fovea && {command}"])
    script = f"{mounting}\nexec {inside}\n"
    namespaces = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    command_line = [*namespaces, "--propagation", "private", "sh", "-c", script]
    return subprocess.run(command_line, cwd=system, check=False).returncode


def processor_seconds() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_system(name: str, target: str) -> tuple[int, str]:
    """Run the suite in a system. Returns the exit status, and a line with the processor time of each part."""
    system = make_system(name)
    mounting = mounts(system)
    parts = {
        "installation": "make .venv/.installed-dev",
        "checks": "make check",
        target: f"make {target} FOLDERS=1",
    }
    if name == "servers":
        parts = {"servers": "make servers", **parts}
    details, status, begin = [], 0, processor_seconds()
    for part, command in parts.items():
        before = processor_seconds()
        status = run_inside(system, mounting, command)
        details.append(f"{part} {processor_seconds() - before:.0f} s")
        if status:
            details.append(f"failed with exit status {status}")
            break
    total = processor_seconds() - begin
    shutil.rmtree(system, ignore_errors=True)
    return status, f"{name}: {total:.0f} s of processor time ({', '.join(details)})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)} (default: all)"
    )
    parser.add_argument(
        "--suite", default="test", metavar="TARGET", help="target of the Makefile (default: test)"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.systems if name not in SYSTEMS]:
        parser.error(f"{unknown[0]!r} is not a system; accepted: {', '.join(SYSTEMS)}")
    systems = args.systems or [*SYSTEMS]
    if reason := reason_against() or reason_against_making(systems):
        print(f"test-fresh is skipped: {reason}", file=sys.stderr)
        return CANNOT
    status, summary = 0, []
    for name in systems:
        ended, line = test_system(name, args.suite)
        status, summary = status or ended, [*summary, line]
    print("\n".join(summary))
    return status


if __name__ == "__main__":
    sys.exit(main())
