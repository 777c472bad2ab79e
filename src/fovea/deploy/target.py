"""The targets: they render a spec into files, and name the tools that check these files.

A renderer is pure: the same spec gives the same texts, and nothing is read or written. Files are named by
paths relative to the output folder. A target's module defines `render` and `checks`:

    def render(spec: DeploySpec) -> Files: ...
    def checks(spec: DeploySpec) -> tuple[Check, ...]: ...
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

from fovea.core.errors import ConfigError
from fovea.deploy.spec import DeploySpec

Files = dict[str, str]
"""Texts by path. Paths are relative, with forward slashes. A script begins with "#!"."""


@dataclass(frozen=True, slots=True)
class Check:
    """One command that checks rendered files with the target's own tool.

    tool: name of the program, looked up in PATH, /usr/sbin and beside Python.
    arguments: its arguments; "{dir}" stands for the output folder.
    subject: what it checks, in words.
    silent: whether any output is a fault: some tools warn of a misspelt key, and succeed.
    programs: commands that do the same, in the order in which they are looked for; none: only `tool`. Of two
        words, the second is a part of the program that may be missing, and must know the argument `version`.
    certificate: path of the file that names the certificate of CERTIFICATES, if the check opens it. The check
        gets a copy of this file, in another folder, with a certificate of its own.
    """

    tool: str
    arguments: tuple[str, ...]
    subject: str
    silent: bool = False
    programs: tuple[tuple[str, ...], ...] = ()
    certificate: str = ""


class Renderer(Protocol):
    """The functions that the module of a target defines."""

    def render(self, spec: DeploySpec) -> Files:
        """Return the target's files. Raises ConfigError if the spec cannot be rendered for it."""
        ...

    def checks(self, spec: DeploySpec) -> tuple[Check, ...]:
        """Return the commands that check the rendered files."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """One target: its name, its module under fovea.deploy.targets, and what it renders."""

    name: str
    module: str
    text: str

    def load(self) -> Renderer:
        """Import the target's module."""
        return cast(Renderer, importlib.import_module(f"fovea.deploy.targets.{self.module}"))


TARGETS = (
    Target("docker", "docker", "Dockerfiles for CPUs and CUDA"),
    Target("compose", "compose", "Compose stack of all services, with NGINX and monitoring"),
    Target("local", "local", "the same stack as processes of this machine, without containers"),
    Target("systemd", "systemd", "units of systemd"),
    Target("nginx", "nginx", "configuration of NGINX"),
    Target("haproxy", "haproxy", "configuration of HAProxy"),
    Target("envoy", "envoy", "configuration of Envoy"),
    Target("kubernetes", "kubernetes", "manifests for Kubernetes, as a kustomization"),
    Target("kserve", "kserve", "InferenceService and ServingRuntime of KServe"),
    Target(
        "leaderworkerset",
        "leaderworkerset",
        "LeaderWorkerSets: for each engine one pod per device",
    ),
    Target(
        "rayservice", "rayservice", "RayServices of KubeRay: engines on Ray Serve, scaled by their signals"
    ),
    Target("gateway-api", "gateway_api", "Gateway API routes and InferencePools"),
    Target("istio", "istio", "VirtualService and DestinationRules of Istio"),
    Target("triton", "triton", "model repository of Triton, and its OpenAI frontend"),
    Target("vertex", "vertex", "container and upload script for Vertex AI"),
    Target("sagemaker", "sagemaker", "container and deployment script for SageMaker"),
    Target("huggingface-space", "huggingface_space", "Space of Hugging Face, with Gradio"),
)


def target(name: str) -> Target:
    """Return a target by its name. Raises ConfigError."""
    for each in TARGETS:
        if each.name == name:
            return each
    raise ConfigError(
        f"target is {name!r}; accepted: {', '.join(each.name for each in TARGETS)}", param="target"
    )


def render(spec: DeploySpec, names: Iterable[str]) -> Files:
    """Return the files of all named targets.

    Raises ConfigError if a target cannot be rendered, or two of them render one path differently.
    """
    files: Files = {}
    for name in names:
        for path, text in target(name).load().render(spec).items():
            if files.setdefault(path, text) != text:
                raise ConfigError(
                    f"target {name!r} renders {path} unlike another target; "
                    "accepted: one of the two targets in a folder",
                    param="target",
                )
            check_path(path)
    return files


def check_path(path: str) -> None:
    """Raise ValueError if a path is not relative and under the output folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or str(parts) != path:
        raise ValueError(f"a renderer returned the path {path!r}")


CHECK_TIMEOUT_S = 120.0
CERTIFICATES = "/etc/fovea/tls"
"""Folder of the certificate tls.crt and its key tls.key on the machine of a rendered proxy."""
OPENSSL = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=fovea-check"


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check.

    status: "passed", "failed", or "skipped" if the tool is not installed.
    output: what the tool printed; for a skipped check, which tool is missing.
    """

    check: Check
    status: str
    output: str


def find_program(tool: str) -> str | None:
    """Return the path of a program: beside Python, in PATH, or in /usr/sbin."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    return shutil.which(tool, path=places)


def find_command(check: Check) -> list[str] | None:
    """Return the command of a check's tool, or of one that does the same; None: none of them is installed."""
    for first, *rest in check.programs or ((check.tool,),):
        program = find_program(first)
        if program is None:
            continue
        if not rest or _run([program, *rest, "version"])[0] == 0:
            return [program, *rest]
    return None


def run_check(check: Check, folder: Path) -> CheckOutcome:
    """Run one check on the files in a folder."""
    command = find_command(check)
    if command is None:
        return CheckOutcome(check, "skipped", f"not installed: {_listed(check)}")
    if not check.certificate:
        return _outcome(check, command, {"{dir}": str(folder)})
    openssl = find_program("openssl")
    if openssl is None:
        return CheckOutcome(
            check, "skipped", "not installed: openssl, which makes a certificate for the check"
        )
    with tempfile.TemporaryDirectory(prefix="fovea-check-") as name:
        copies = Path(name)
        paths = ["-keyout", str(copies / "tls.key"), "-out", str(copies / "tls.crt")]
        status, output = _run([openssl, *OPENSSL.split(), *paths])
        if status != 0:
            return CheckOutcome(check, "failed", f"openssl made no certificate: {output}")
        text = (folder / check.certificate).read_text(encoding="utf-8")
        copy = copies / check.certificate
        copy.write_text(text.replace(CERTIFICATES, name), encoding="utf-8")
        return _outcome(check, command, {f"{{dir}}/{check.certificate}": str(copy), "{dir}": str(folder)})


def output_of(command: tuple[str, ...]) -> str:
    """Return what a command prints; "": its program is not installed, or it failed."""
    program = find_program(command[0])
    if program is None:
        return ""
    status, output = _run([program, *command[1:]])
    return output if status == 0 else ""


def _listed(check: Check) -> str:
    return ", ".join(" ".join(words) for words in check.programs) or check.tool


def _outcome(check: Check, command: list[str], places: Mapping[str, str]) -> CheckOutcome:
    arguments = list(check.arguments)
    for name, place in places.items():
        arguments = [part.replace(name, place) for part in arguments]
    status, output = _run([*command, *arguments])
    failed = status != 0 or (check.silent and output)
    return CheckOutcome(check, "failed" if failed else "passed", output)


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command. Returns its exit status and all that it printed."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{Path(command[0]).name} took longer than {CHECK_TIMEOUT_S:.0f} seconds"
    return done.returncode, (done.stdout + done.stderr).strip()
