"""SageMaker: the entry point of the container, and an endpoint as a template of CloudFormation."""

from __future__ import annotations

import json
import re

from fovea.core.errors import ConfigError
from fovea.deploy.formats import fill_template
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.docker import cloud_dockerfile, server_config

FOLDER = "sagemaker"
MOST_BODY_MIB = 25
"""SageMaker refuses larger requests."""
MOST_STREAM_S = 480
"""Seconds after which SageMaker cuts a stream. It cuts other answers after 60 seconds."""
DRAIN_S = 25
"""SageMaker kills a container 30 seconds after SIGTERM."""
START_S = 1800
GPUS = {
    "T4": "ml.g4dn.2xlarge",
    "L4": "ml.g6.2xlarge",
    "A10": "ml.g5.2xlarge",
    "L40S": "ml.g6e.2xlarge",
    "A100-40GB": "ml.p4d.24xlarge",
    "A100-80GB": "ml.p4de.24xlarge",
    "H100-80GB": "ml.p5.48xlarge",
    "H200-141GB": "ml.p5en.48xlarge",
}
"""Smallest usual instance type with a GPU. The last four have eight GPUs."""
CPUS = ((4, "ml.m5.xlarge"), (8, "ml.m5.2xlarge"), (16, "ml.m5.4xlarge"), (48, "ml.m5.12xlarge"))
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]")


def render(spec: DeploySpec) -> Files:
    """Return the files for the first pool. Raises ConfigError if no instance type fits it."""
    pool = spec.pools[0]
    comment = "Settings of `fovea serve` on SageMaker. The entry point sets model, host and port."
    limits = {
        "max_body_mib": min(spec.max_body_mib, MOST_BODY_MIB),
        "request_timeout": float(min(spec.max_answer_s, MOST_STREAM_S)),
        "drain_seconds": float(min(spec.stop.drain_s, DRAIN_S)),
        "lame_duck_s": 0.0,
        "server_names": ("*",),
    }
    template = fill_template(
        "sagemaker/endpoint.json.j2",
        spec=spec,
        pool=pool,
        instance_type=instance_type(spec, pool),
        start_s=START_S,
    )
    region = f" --region {spec.cloud.region}" if _REGION.fullmatch(spec.cloud.region) else ""
    role = "" if spec.cloud.role_arn else ' "Role=${ROLE:?set ROLE to the ARN of the execution role}"'
    user = "# SageMaker mounts the model for root, and says that containers run as root.\n"
    user += "# hadolint ignore=DL3002\nUSER 0"
    return {
        f"{FOLDER}/Dockerfile": cloud_dockerfile(spec, pool, FOLDER, ("entrypoint.sh", "fovea.toml"), user),
        f"{FOLDER}/entrypoint.sh": fill_template("sagemaker/entrypoint.sh.j2", pool=pool),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment, **limits),
        f"{FOLDER}/endpoint.json": json.dumps(json.loads(template), indent=2) + "\n",
        f"{FOLDER}/deploy.sh": fill_template("sagemaker/deploy.sh.j2", spec=spec, region=region, role=role),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the scripts, the image and the template."""
    scripts = tuple(f"{{dir}}/{FOLDER}/{name}" for name in ("entrypoint.sh", "deploy.sh"))
    return (
        Check("shellcheck", scripts, "scripts for SageMaker"),
        Check("hadolint", (f"{{dir}}/{FOLDER}/Dockerfile",), "image for SageMaker"),
        Check("python3", ("-m", "json.tool", f"{{dir}}/{FOLDER}/endpoint.json"), "template is JSON"),
        Check("cfn-lint", (f"{{dir}}/{FOLDER}/endpoint.json",), "template of CloudFormation"),
    )


def instance_type(spec: DeploySpec, pool: Pool) -> str:
    """Return the instance type. Raises ConfigError if none fits."""
    if pool.mig:
        raise ConfigError(
            f"mig is {pool.mig!r}: SageMaker's endpoints have whole GPUs; accepted: no mig", param="mig"
        )
    if spec.cloud.machine_type:
        return spec.cloud.machine_type
    if pool.hardware == "cuda":
        if pool.gpu not in GPUS:
            raise ConfigError(
                f"gpu is {pool.gpu!r}; accepted for SageMaker: {', '.join(GPUS)}, or machine_type",
                param="gpu",
            )
        return GPUS[pool.gpu]
    for cpus, name in CPUS:
        if cpus >= pool.cpus:
            return name
    raise ConfigError(f"cpus is {pool.cpus}; accepted for SageMaker: up to 48, or machine_type", param="cpus")
