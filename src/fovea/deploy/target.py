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
from collections.abc import Iterable
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
    """

    tool: str
    arguments: tuple[str, ...]
    subject: str
    silent: bool = False


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


def run_check(check: Check, folder: Path) -> CheckOutcome:
    """Run one check on the files in a folder."""
    program = find_program(check.tool)
    if program is None:
        return CheckOutcome(check, "skipped", f"{check.tool} is not installed")
    command = [program, *(part.replace("{dir}", str(folder)) for part in check.arguments)]
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
        return CheckOutcome(check, "failed", f"{check.tool} took longer than {CHECK_TIMEOUT_S:.0f} seconds")
    output = (done.stdout + done.stderr).strip()
    failed = done.returncode != 0 or (check.silent and output)
    return CheckOutcome(check, "failed" if failed else "passed", output)
