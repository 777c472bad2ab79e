"""Build the wheels with compiled kernels, of all platforms, on this machine: `make wheel`.

zig's C++ compiler, from PyPI, compiles for all of them. First the source distribution is built, then each
wheel from it. Every wheel is checked (`check.py`). The wheel of this machine is installed and used where
there is no compiler (`install.py`), unless --no-install is given. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools import DISTRIBUTION
from tools.wheels.check import WheelError, check
from tools.wheels.install import check_install
from tools.wheels.platforms import PLATFORMS, Platform, is_this_machine

NAME = DISTRIBUTION.replace("-", "_")
"""The distribution's name as file names have it."""
ZIG = Path(__file__).with_name("zig.py")


def main() -> int:
    args = _arguments()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob(f"{NAME}-*.whl"), *folder.glob(f"{NAME}-*.tar.gz")):
        old.unlink()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _build(Path.cwd(), "--sdist", "--outdir", str(folder))
            source = _unpack(next(folder.glob(f"{NAME}-*.tar.gz")), Path(scratch))
            for each in PLATFORMS:
                if not args.only or each.name in args.only:
                    wheel = build_wheel(each, source, folder)
                    print("\n".join(check(wheel, each)), flush=True)
                    if args.install and is_this_machine(each):
                        print(check_install(wheel), flush=True)
    except (WheelError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_wheel(target: Platform, source: Path, folder: Path) -> Path:
    """Build the wheel of a platform from an unpacked source distribution, and return it."""
    print(f"building for {target.tag}, with {target.target}", flush=True)
    defines = {
        "CMAKE_SYSTEM_NAME": target.system,
        "CMAKE_SYSTEM_PROCESSOR": target.machine,
        "CMAKE_CXX_COMPILER": f"{sys.executable};{ZIG};{target.target}",
    }
    options = ["wheel.cmake=true", f"wheel.tags=py3-none-{target.tag}"]
    options += [f"cmake.define.{name}={value}" for name, value in defines.items()]
    _build(source, "--wheel", "--outdir", str(folder), *(f"-C{option}" for option in options))
    return next(folder.glob(f"{NAME}-*-{target.tag}.whl"))


def _build(source: Path, *options: str) -> None:
    """Run `python -m build` with the tools of this environment. Raises CalledProcessError."""
    tools = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for name in ("CXX", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "build", "--no-isolation", *options, str(source)]
    subprocess.run(command, check=True, env=environment)


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("dist"), help="where the wheels go (default: dist)"
    )
    names = [each.name for each in PLATFORMS]
    parser.add_argument("--only", action="append", choices=names, help="build for this platform (repeatable)")
    parser.add_argument("--no-install", dest="install", action="store_false", help="do not try the wheel")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
