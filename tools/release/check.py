"""Prove that a release can be published: `make release-check`, or `make release-check TAG=v1.2.3`.

Everything but the push is done here. The parts, of which `--only facts,workflows` chooses some:

facts: the version agrees in pyproject.toml, the code and CHANGELOG.md. With a tag, the newest section must
    have a date, and the tag must be the version. The release's note is written to dist/NOTE.md.
workflows: GitHub's schema, and zizmor's audit.
image: hadolint; with a tag, the base images must be pinned by digest.
packages: the wheels of all platforms and the source distribution are built into dist/ and looked through.
install: this machine's wheel answers in an empty environment without a compiler.
newcomer: so it does by `uvx` and `pipx run`, from an index, in an empty home.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.release import facts, image, newcomer, packages
from tools.wheels.check import WheelError
from tools.wheels.install import ROOT, check_install
from tools.wheels.platforms import PLATFORMS, is_this_machine

DIST = ROOT / "dist"


def check_facts(args: argparse.Namespace) -> Iterator[str]:
    yield from facts.problems(ROOT, args.tag)
    DIST.mkdir(exist_ok=True)
    text = facts.note((ROOT / "CHANGELOG.md").read_text())
    (DIST / "NOTE.md").write_text(f"{text}\n")


def check_workflows(args: argparse.Namespace) -> Iterator[str]:
    files = [str(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
    yield from _fails("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    yield from _fails("zizmor", "--offline", "--no-progress", *files)


def check_image(args: argparse.Namespace) -> Iterator[str]:
    text = image.DOCKERFILE.read_text()
    yield from image.problems(text)
    for line in image.unpinned(text):
        if args.tag:
            yield line
        else:
            print(f"  needed before a release: {line}", flush=True)


def check_packages(args: argparse.Namespace) -> Iterator[str]:
    command = [sys.executable, "-m", "tools.wheels.build", "--folder", str(DIST), "--no-install"]
    subprocess.run(command, cwd=ROOT, check=True)
    yield from packages.problems(DIST, facts.version_of(ROOT), ROOT)
    print(packages.listing(_wheel()), flush=True)


def check_installed(args: argparse.Namespace) -> Iterator[str]:
    for python in args.python or [sys.executable]:
        print(check_install(_wheel(), python, args.torch_index), flush=True)
    yield from ()


def check_newcomer(args: argparse.Namespace) -> Iterator[str]:
    print(newcomer.sizes(_wheel(), args.torch), flush=True)
    for tool in newcomer.TOOLS:
        print(newcomer.check(tool, _wheel(), args.torch), flush=True)
    yield from ()


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "facts": check_facts,
    "workflows": check_workflows,
    "image": check_image,
    "packages": check_packages,
    "install": check_installed,
    "newcomer": check_newcomer,
}


def _fails(tool: str, *words: str) -> Iterator[str]:
    """Yield what a tool of this environment prints, if it ends with an error."""
    command = [str(Path(sys.executable).with_name(tool)), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        yield f"{tool}: {done.stdout}{done.stderr}"


def _wheel() -> Path:
    """Return this machine's wheel in dist/. Raises WheelError if there is none."""
    tags = [each.tag for each in PLATFORMS if is_this_machine(each)]
    found = [path for tag in tags for path in DIST.glob(f"{packages.NAME}-*-{tag}.whl")]
    if not found:
        raise WheelError(f"{DIST} has no wheel for this machine: run the part `packages`, or `make wheel`")
    return found[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tag", default="", help="tag of the release, such as v1.2.3")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts, with commas (default: {','.join(PARTS)})"
    )
    parser.add_argument(
        "--torch", type=Path, help="a wheel of torch for CPUs (default: from PyTorch's index)"
    )
    parser.add_argument(
        "--torch-index", default="", help="index that torch is installed from (default: PyPI)"
    )
    parser.add_argument("--python", action="append", help="interpreter for the part install (repeatable)")
    args = parser.parse_args()
    args.parts = args.only.split(",")
    if unknown := sorted(set(args.parts) - PARTS.keys()):
        parser.error(f"--only: {', '.join(unknown)} is unknown; accepted: {', '.join(PARTS)}")
    return args


def main() -> int:
    args = _arguments()
    status = 0
    for part in args.parts:
        print(f"{part}:", flush=True)
        try:
            found = list(PARTS[part](args))
        except (WheelError, subprocess.CalledProcessError) as error:
            found = [str(error)]
        print("\n".join(f"  {line}" for line in found) or "  good", flush=True)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
