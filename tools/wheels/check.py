"""Checks that a wheel holds what it should and runs on the systems that its name promises."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.wheels.platforms import Platform

MODEL = "fovea/assets/"
NATIVE = "fovea/kernels/native"
NEEDED = ("fovea/py.typed", f"{MODEL}fovea-tiny/model.safetensors", f"{NATIVE}/cpu/product.cpp")
MAXIMAL_BYTES = 10 * 1000**2
"""Size that a wheel must stay under, without the bundled model."""
GLIBC = (2, 28)
MACOS = (11, 0)


class WheelError(Exception):
    """A wheel is not as it should be."""


def check(wheel: Path, target: Platform) -> list[str]:
    """Return lines that say what is in the wheel. Raises WheelError if it is not as it should be."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        sets = json.loads(archive.read(f"{NATIVE}/instruction_sets.json"))["sets"]
        expected = {f"{NATIVE}/lib/{each['name']}.so" for each in sets if each["machine"] == target.machine}
        libraries = {name for name in names if name.startswith(f"{NATIVE}/lib/")}
        if libraries != expected or not names >= set(NEEDED):
            raise WheelError(f"{wheel.name} has {sorted(libraries)}, but should have {sorted(expected)}")
        if target.system == "Darwin":
            for name in sorted(libraries):
                check_mach_o(name, archive.read(name))
    model = sum(entry.compress_size for entry in entries if entry.filename.startswith(MODEL))
    rest = wheel.stat().st_size - model
    if rest >= MAXIMAL_BYTES:
        raise WheelError(f"{wheel.name} has {rest:,} bytes without the model; {MAXIMAL_BYTES:,} are too many")
    lines = [
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {rest / 1e6:.2f} MB without the bundled model",
        *(
            f"  {entry.filename}: {entry.file_size:,} bytes"
            for entry in entries
            if entry.filename in libraries
        ),
    ]
    if target.system == "Darwin":
        return [*lines, f"  ARM libraries of macOS {MACOS[0]}.{MACOS[1]}; built, but never run here"]
    return [*lines, f"  {check_linux(wheel)}"]


def check_linux(wheel: Path) -> str:
    """Return auditwheel's finding.

    Raises WheelError if the wheel needs a newer glibc than 2.28, or libraries that it does not bring.
    """
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    told = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_\w+"', told)
    if not found or (int(found[1]), int(found[2])) > GLIBC:
        raise WheelError(f"{wheel.name} does not run on glibc {GLIBC[0]}.{GLIBC[1]}: {told}")
    return f"auditwheel: runs on {found[0].split(chr(34))[1]} and later"


def check_mach_o(name: str, content: bytes) -> None:
    """Check the header of a library for macOS.

    Raises WheelError if it is not an ARM library, needs a newer macOS than 11.0, needs libraries that are not
    the system's, or is not signed (Macs with ARM processors load nothing else). The layout is that of Apple's
    <mach-o/loader.h>.
    """
    magic, machine, _, kind, commands = struct.unpack_from("<5I", content)
    if (magic, machine, kind) != (0xFEEDFACF, 0x0100000C, 6):
        raise WheelError(f"{name} is not a library for macOS on ARM")
    at, needed, signed = 32, None, False
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", content, at)
        if command == 0x32:  # LC_BUILD_VERSION: platform, minimal version as 16.8.8 bits
            (version,) = struct.unpack_from("<I", content, at + 12)
            needed = (version >> 16, version >> 8 & 255)
        elif command == 0xC:  # LC_LOAD_DYLIB: offset of a path that ends with a zero
            (offset,) = struct.unpack_from("<I", content, at + 8)
            path = content[at + offset : at + size].rstrip(b"\0").decode()
            if not path.startswith("/usr/lib/"):
                raise WheelError(f"{name} needs {path}")
        signed |= command == 0x1D  # LC_CODE_SIGNATURE
        at += size
    if needed is None or needed > MACOS:
        raise WheelError(f"{name} needs macOS {needed}; {MACOS} is promised")
    if not signed:
        raise WheelError(f"{name} is not signed")
