"""Dockerfiles for CPUs and, if a pool needs it, CUDA. They build the image from a clone of the repository."""

from __future__ import annotations

from fovea import __version__
from fovea.deploy.spec import DeploySpec
from fovea.deploy.target import Check, Files
from fovea.deploy.templates import fill

USER_ID = 1000
"""User and group id of the processes in a container."""
HOME = "/var/lib/fovea"
"""Folder of downloaded weights and caches in a container, the only one that must be writable beside /tmp."""
TORCH = "2.13.0"


def render(spec: DeploySpec) -> Files:
    """Return the Dockerfiles, each with the list of files that its build may see."""
    ignore = fill("docker/dockerignore.j2")
    files = {"Dockerfile": _dockerfile(spec, cuda=False), "Dockerfile.dockerignore": ignore}
    if _has_cuda(spec):
        files["Dockerfile.cuda"] = _dockerfile(spec, cuda=True)
        files["Dockerfile.cuda.dockerignore"] = ignore
    return files


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the commands that check the rendered files."""
    names = ("Dockerfile", "Dockerfile.cuda") if _has_cuda(spec) else ("Dockerfile",)
    return tuple(
        Check("hadolint", (f"{{dir}}/{name}",), f"hadolint finds no fault in {name}") for name in names
    )


def _has_cuda(spec: DeploySpec) -> bool:
    return any(pool.hardware == "cuda" for pool in spec.pools)


def _dockerfile(spec: DeploySpec, *, cuda: bool) -> str:
    return fill(
        "docker/Dockerfile.j2",
        cuda=cuda,
        image=spec.image_cuda if cuda else spec.image,
        name="Dockerfile.cuda" if cuda else "Dockerfile",
        extras="video,redis,otel,nvml" if cuda else "video,redis,otel",
        port=spec.engine_port,
        user_id=USER_ID,
        home=HOME,
        torch=TORCH,
        version=__version__,
    )
