"""Dockerfiles for CPUs and, if a pool needs it, CUDA. They build the image from a clone of the repository.

Targets of clouds take from here what their containers share: the settings of `fovea serve`, and the image
that adds scripts to the pool's own.
"""

from __future__ import annotations

from typing import Any

from fovea import __version__
from fovea.deploy.formats import fill_template, toml_text
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files

USER_ID = 1000
"""User and group id of the processes in a container."""
HOME = "/var/lib/fovea"
"""Folder of downloaded weights and caches in a container, the only one that must be writable beside /tmp."""
TORCH = "2.13.0"


def render(spec: DeploySpec) -> Files:
    """Return the Dockerfiles, each with the list of files that its build may see."""
    ignore = fill_template("docker/dockerignore.j2")
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
    return fill_template(
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


PARSE = "import ast, sys; ast.parse(open(sys.argv[1]).read())"
"""A program that checks the syntax of a Python file."""


def server_config(spec: DeploySpec, pool: Pool, comment: str, **changes: Any) -> str:
    """Return the file of `--config`, without the model and the address, which the entry point sets.

    changes: settings that the cloud needs. They are overridden by the pool's own settings.
    """
    values = {**spec.engine_settings(pool), **changes, **pool.settings}
    for name in ("model", "host", "port"):
        values.pop(name)
    return toml_text(values, comment=comment)


def cloud_dockerfile(spec: DeploySpec, pool: Pool, folder: str, names: tuple[str, ...], user: str) -> str:
    """Return an image that adds scripts to the pool's image, and starts `entrypoint.sh`.

    folder: of the rendered files, for the comment. names: of the files to add.
    user: the line that sets the user.
    """
    return f"""\
# docker build -t {spec.name}-{folder} {folder}
FROM {spec.image_of(pool)}
USER 0
COPY --chmod=755 {" ".join(names)} /opt/fovea/
{user}
ENTRYPOINT ["/opt/fovea/entrypoint.sh"]
"""
