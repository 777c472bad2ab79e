"""Vertex AI: the entry point of the container, and the script that uploads and deploys it."""

from __future__ import annotations

from fovea.core.errors import ConfigError
from fovea.deploy.formats import fill_template, plain_file
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import Check, Files
from fovea.deploy.targets.docker import PARSE, cloud_dockerfile, server_config

FOLDER = "vertex"
SCRIPTS = ("entrypoint.sh", "deploy.sh")
MACHINES = {
    "T4": ("n1-standard-8", "NVIDIA_TESLA_T4"),
    "L4": ("g2-standard-8", "NVIDIA_L4"),
    "A100-40GB": ("a2-highgpu-1g", "NVIDIA_TESLA_A100"),
    "A100-80GB": ("a2-ultragpu-1g", "NVIDIA_A100_80GB"),
    "H100-80GB": ("a3-highgpu-1g", "NVIDIA_H100_80GB"),
}
"""Machine type and accelerator by GPU. Other GPUs need `machine_type` in the spec, if Vertex AI has them."""
MOST_ANSWER_S = 3600
"""Seconds that an endpoint waits for an answer, at most."""
CPU_MACHINES = ((4, "n2-standard-4"), (8, "n2-standard-8"), (16, "n2-standard-16"), (32, "n2-standard-32"))


def render(spec: DeploySpec) -> Files:
    """Return the files for the first pool. Raises ConfigError if no machine type fits it."""
    pool = spec.pools[0]
    comment = "Settings of `fovea serve` on Vertex AI. The entry point sets model, host and port."
    names = ("entrypoint.sh", "fetch_model.py", "fovea.toml")
    return {
        f"{FOLDER}/Dockerfile": cloud_dockerfile(spec, pool, FOLDER, names, "USER 1000"),
        f"{FOLDER}/entrypoint.sh": fill_template("vertex/entrypoint.sh.j2", pool=pool),
        f"{FOLDER}/fetch_model.py": plain_file("vertex/fetch_model.py"),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment, server_names=("*",)),
        f"{FOLDER}/deploy.sh": fill_template(
            "vertex/deploy.sh.j2",
            spec=spec,
            longest=min(spec.max_answer_s, MOST_ANSWER_S),
            machine_flags=_machine_flags(spec, pool),
        ),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the scripts and the image."""
    return (
        Check("shellcheck", tuple(f"{{dir}}/{FOLDER}/{name}" for name in SCRIPTS), "scripts for Vertex AI"),
        Check("hadolint", (f"{{dir}}/{FOLDER}/Dockerfile",), "image for Vertex AI"),
        Check("python3", ("-c", PARSE, f"{{dir}}/{FOLDER}/fetch_model.py"), "syntax of the download"),
    )


def machine(spec: DeploySpec, pool: Pool) -> tuple[str, str]:
    """Return the machine type and the accelerator ("" without one). Raises ConfigError if none fits."""
    wanted = spec.cloud.machine_type
    if pool.hardware == "cpu":
        fitting = [name for cpus, name in CPU_MACHINES if cpus >= pool.cpus]
        if not wanted and not fitting:
            raise ConfigError(f"cpus is {pool.cpus}; accepted: up to 32, or machine_type", param="cpus")
        return wanted or fitting[0], ""
    if pool.gpu not in MACHINES:
        raise ConfigError(f"gpu is {pool.gpu!r}; accepted for Vertex AI: {', '.join(MACHINES)}", param="gpu")
    name, accelerator = MACHINES[pool.gpu]
    return wanted or name, accelerator


def _machine_flags(spec: DeploySpec, pool: Pool) -> str:
    """Return the flags of deploy-model that choose machines and their number, one per line."""
    kind, accelerator = machine(spec, pool)
    most = pool.max_replicas or pool.replicas
    flags = [f"machine-type={kind}"]
    if accelerator:
        flags.append(f"accelerator=type={accelerator.lower().replace('_', '-')},count=1")
    if pool.mig:
        flags.append(f"gpu-partition-size={pool.mig}")
    if pool.spot:
        flags.append("spot")
    flags += [f"min-replica-count={pool.replicas}", f"max-replica-count={most}"]
    if most > pool.replicas:
        flags.append(f"autoscaling-metric-specs={'gpu-duty-cycle' if accelerator else 'cpu-usage'}=70")
    return " \\\n".join(f"  --{flag}" for flag in flags)
