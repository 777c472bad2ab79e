"""Tries a wheel as somebody does who has nothing but uv or pipx: `make release-check` runs it.

The home folder is empty, and PATH has uv or pipx, Python and two of the system's programs: no compiler, no
Fovea. A server of this program offers the wheel as an index does; all else comes from PyPI. `uvx` and
`pipx run` then answer a question about a picture, twice. With a wheel of torch for CPUs, the index offers it,
too; without one, PyTorch's own index does, by the options that docs/install.md names.

`python -m tools.release.newcomer --sizes` prints what an installation downloads, with torch for CUDA or CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools import DISTRIBUTION
from tools.wheels.check import WheelError
from tools.wheels.install import ROOT, TORCH

TOOLS = ("uvx", "pipx")
COREUTILS = ("realpath", "dirname")
"""Programs that the scripts of uv's environments call."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PICTURE, QUESTION = "shapes.png", "How many objects can you see?"
_KEPT = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
)
"""Variables of the network that a machine behind a proxy needs. All others are left out."""


@contextmanager
def index(*wheels: Path) -> Iterator[str]:
    """Serve wheels as a package index (PEP 503) until the end of the block, and yield its address."""
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in wheels:
            folder = Path(scratch) / wheel.name.split("-")[0].replace("_", "-").lower()
            folder.mkdir(exist_ok=True)
            (folder / wheel.name).symlink_to(wheel.resolve())
        for folder in Path(scratch).iterdir():
            links = [f'<a href="{each.name}">{each.name}</a>' for each in folder.iterdir()]
            (folder / "index.html").write_text(
                f"<!DOCTYPE html><html><body>{'<br>'.join(links)}</body></html>"
            )
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=scratch)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/"
            finally:
                server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def check(tool: str, wheel: Path, torch: Path | None) -> str:
    """Return how long a newcomer waits for an answer, the first time and the second.

    tool: "uvx" or "pipx". torch: a wheel for CPUs; None: from PyTorch's index.
    Raises WheelError if the answer is wrong, or if something was compiled.
    """
    wheels = (wheel, torch) if torch else (wheel,)
    with tempfile.TemporaryDirectory() as scratch, index(*wheels) as address:
        home, programs = Path(scratch) / "home", Path(scratch) / "bin"
        for folder in (home, programs):
            folder.mkdir()
        for name in ("uv", "uvx") if tool == "uvx" else ("pipx",):
            (programs / name).symlink_to(Path(sys.executable).with_name(name))
        for name in COREUTILS:
            (programs / name).symlink_to(str(shutil.which(name)))
        interpreter = Path(sys.executable).resolve()
        (programs / f"python{sys.version_info.major}.{sys.version_info.minor}").symlink_to(interpreter)
        shutil.copy(ROOT / "examples" / PICTURE, home / "picture.png")
        variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
        variables |= {"HOME": str(home), "PATH": str(programs), "UV_PYTHON_DOWNLOADS": "never"}
        command = _command(tool, address, torch, home)
        times = [_timed(command, variables, home) for _ in range(2)]
        if (home / ".cache" / "fovea").exists():
            raise WheelError("something was compiled or kept in ~/.cache/fovea")
        size = sum(path.lstat().st_size for path in home.rglob("*") if path.is_file())
    first, second = (f"{wall:.0f} s ({processor:.1f} s of processor time)" for wall, processor in times)
    return f"{tool}: {first} to the first answer, {second} to the next; {size / 1e6:,.0f} MB on disk"


def _timed(command: list[str], variables: dict[str, str], home: Path) -> tuple[float, float]:
    """Return the seconds, and those of processor time, of a right answer. Raises WheelError for others."""
    used, started = _processor_s(), time.monotonic()
    done = subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True)
    wall = time.monotonic() - started
    if done.returncode or done.stdout.strip() not in _answers():
        raise WheelError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return wall, _processor_s() - used


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(tool: str, address: str, torch: Path | None, home: Path) -> list[str]:
    question = ["fovea", "ask", "picture.png", QUESTION]
    if tool == "uvx":
        backend = [] if torch else ["--torch-backend=cpu"]
        return ["uvx", "--index", address, *backend, "--from", DISTRIBUTION, *question]
    options = ["--extra-index-url", address]
    if torch:
        # pip takes the newest of all indexes. PyTorch's has the newest as well, so it needs no constraint.
        (home / "constraints.txt").write_text(f"{TORCH}\n")
        options += ["--constraint", str(home / "constraints.txt")]
    else:
        options += ["--extra-index-url", CPU_INDEX]
    return ["pipx", "run", f"--pip-args={' '.join(options)}", "--spec", DISTRIBUTION, *question]


def _answers() -> list[str]:
    lines = [json.loads(line) for line in (ROOT / "examples/questions.jsonl").read_text().splitlines()]
    return next(
        each["answers"] for each in lines if each["images"] == [PICTURE] and each["question"] == QUESTION
    )


def sizes(wheel: Path, torch: Path | None) -> str:
    """Return the megabytes that an installation downloads on Linux, by uv's choice of versions.

    torch: a wheel for CPUs, whose size then replaces torch of PyPI with all that only it needs.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as scratch:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        text = f'[project]\nname = "download"\nversion = "0"\nrequires-python = "=={version}.*"\n'
        text += f"dependencies = {json.dumps(project['dependencies'])}\n[tool.uv]\nenvironments = "
        text += json.dumps(["sys_platform == 'linux' and platform_machine == 'x86_64'"])
        (Path(scratch) / "pyproject.toml").write_text(text)
        command = [str(Path(sys.executable).with_name("uv")), "lock", "--quiet", "--python", sys.executable]
        subprocess.run(command, cwd=scratch, check=True)
        packages = tomllib.loads((Path(scratch) / "uv.lock").read_text())["package"]
    bytes_of = {each["name"]: _size(each.get("wheels", []), version.replace(".", "")) for each in packages}
    cuda = {name for name in bytes_of if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))}
    with_cuda = sum(bytes_of[name] for name in cuda)
    own, others = wheel.stat().st_size, sum(size for name, size in bytes_of.items() if name not in cuda)
    lines = [
        f"{DISTRIBUTION}: {own / 1e6:.0f} MB",
        f"{len(bytes_of) - len(cuda)} other packages: {others / 1e6:.0f} MB",
        f"torch of PyPI with CUDA: {with_cuda / 1e6:,.0f} MB in {len(cuda)} packages",
    ]
    if torch:
        lines.append(f"torch for CPUs: {torch.stat().st_size / 1e6:.0f} MB")
    return "\n".join(lines)


def _size(wheels: list[dict[str, object]], python: str) -> int:
    """Return the bytes of the wheel for this Python on Linux (the largest, if several would do)."""
    fit = []
    for each in wheels:
        _, version, abi, platform = str(each["url"]).removesuffix(".whl").rsplit("-", 3)
        fits = (f"cp{python}" in version and abi == f"cp{python}") or abi in ("none", "abi3")
        if fits and ("any" in platform or ("manylinux" in platform and "x86_64" in platform)):
            fit.append(int(str(each.get("size", 0))))
    return max(fit, default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--wheel", type=Path, required=True, help="Fovea's wheel for this machine")
    parser.add_argument(
        "--torch", type=Path, help="a wheel of torch for CPUs (default: from PyTorch's index)"
    )
    parser.add_argument(
        "--tool", action="append", choices=TOOLS, help="try with this tool (repeatable; default: all)"
    )
    parser.add_argument("--sizes", action="store_true", help="print what is downloaded, and try nothing")
    args = parser.parse_args()
    if args.sizes:
        print(sizes(args.wheel, args.torch))
        return 0
    for tool in args.tool or TOOLS:
        print(check(tool, args.wheel, args.torch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
