"""Vertex AI: the entry point of the container, and the script that uploads and deploys it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fovea.core.errors import ConfigError
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
        f"{FOLDER}/entrypoint.sh": _entrypoint(pool),
        f"{FOLDER}/fetch_model.py": _fetch_model(),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment, server_names=("*",)),
        f"{FOLDER}/deploy.sh": _deploy(spec, pool),
    }


def checks(spec: DeploySpec) -> tuple[Check, ...]:
    """Return the checks of the scripts and the image."""
    return (
        Check("shellcheck", tuple(f"{{dir}}/{FOLDER}/{name}" for name in SCRIPTS), "scripts for Vertex AI"),
        Check("hadolint", (f"{{dir}}/{FOLDER}/Dockerfile",), "image for Vertex AI"),
        Check("python3", ("-c", PARSE, f"{{dir}}/{FOLDER}/fetch_model.py"), "syntax of the download"),
    )


@cache
def _fetch_model() -> str:
    return files(__package__).joinpath("fetch_model.py").read_text(encoding="utf-8")


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


def _entrypoint(pool: Pool) -> str:
    return f"""\
#!/bin/sh
# Starts Fovea in a container of Vertex AI, which sets the variables AIP_*.
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)

fail() {{
  echo "entrypoint: $1" >&2
  exit 1
}}

case "${{AIP_PREDICT_ROUTE:-/v1/predict}}" in
  /v1/predict | /invocations) ;;
  *) fail "AIP_PREDICT_ROUTE is $AIP_PREDICT_ROUTE; accepted: /v1/predict, /invocations" ;;
esac
case "${{AIP_HEALTH_ROUTE:-/ready}}" in
  /ready | /ping) ;;
  # /health is 200 while the model loads, so Vertex AI would send requests too early.
  *) fail "AIP_HEALTH_ROUTE is $AIP_HEALTH_ROUTE; accepted: /ready, /ping" ;;
esac

model=${{FOVEA_MODEL:-{pool.model}}}
if [ -n "${{AIP_STORAGE_URI:-}}" ]; then
  model=${{MODEL_FOLDER:-/tmp/model}}
  python3 "$here/fetch_model.py" "$AIP_STORAGE_URI" "$model"
fi
# exec: the server itself gets SIGTERM, and finishes the running requests.
exec fovea serve "$model" --config "$here/fovea.toml" --host 0.0.0.0 --port "${{AIP_HTTP_PORT:-8080}}"
"""


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


def _deploy(spec: DeploySpec, pool: Pool) -> str:
    longest = min(spec.max_answer_s, MOST_ANSWER_S)
    return f"""\
#!/bin/sh
# Uploads the image as a model of Vertex AI, and deploys it on an endpoint.
#
#   deploy.sh IMAGE                 the first model: a new endpoint, which gets all traffic
#   deploy.sh IMAGE ENDPOINT SHARE  a second model on an endpoint, with SHARE percent of its traffic
#
# IMAGE is in Artifact Registry. With ARTIFACTS=gs://BUCKET/FOLDER, the model's files come from there.
set -eu
project={spec.cloud.project}
region={spec.cloud.region}
name={spec.name}
image=${{1:?usage: deploy.sh IMAGE [ENDPOINT SHARE]}}
endpoint=${{2:-}}
share=${{3:-100}}

# The token goes through a pipe: arguments are visible to other users of the machine.
authorization() {{
  printf 'Authorization: Bearer %s\\n' "$(gcloud auth print-access-token)"
}}

set -- ai models upload --project="$project" --region="$region" --display-name="$name" \\
  --container-image-uri="$image" \\
  --container-ports=8080 \\
  --container-predict-route=/v1/predict \\
  --container-health-route=/ready \\
  --container-deployment-timeout-seconds=1800 \\
  --format='value(model)'
if [ -n "${{ARTIFACTS:-}}" ]; then
  set -- "$@" --artifact-uri="$ARTIFACTS"
fi
model=$(gcloud "$@")

split=0=100
if [ -z "$endpoint" ]; then
  # A dedicated endpoint takes 10 MB, streams, and waits longer than a minute. Only the API creates one.
  endpoints="https://$region-aiplatform.googleapis.com/v1/projects/$project/locations/$region/endpoints"
  answer=$(authorization | curl --fail --silent --show-error --request POST "$endpoints" \\
    --header @- --header "Content-Type: application/json" \\
    --data "{{\\"displayName\\": \\"$name\\", \\"dedicatedEndpointEnabled\\": true,
      \\"clientConnectionConfig\\": {{\\"inferenceTimeout\\": \\"{longest}s\\"}}}}")
  endpoint=$(printf '%s' "$answer" | sed -n 's#.*"name": *".*/endpoints/\\([0-9]*\\)/operations/.*#\\1#p')
  authorization | curl --fail --silent --show-error --output /dev/null --header @- \\
    --retry 30 --retry-delay 2 --retry-all-errors "$endpoints/$endpoint"
elif [ "$share" -lt 100 ]; then
  # 0 is the model that is deployed now. The rest goes on to the model that has traffic already.
  current=$(gcloud ai endpoints describe "$endpoint" --project="$project" --region="$region" \\
    --format='value(deployedModels[0].id)')
  split=0=$share,$current=$((100 - share))
fi

gcloud ai endpoints deploy-model "$endpoint" --project="$project" --region="$region" \\
  --model="${{model##*/}}" --display-name="$name" \\
{_machine_flags(spec, pool)} \\
  --traffic-split="$split"
echo "model $model on endpoint $endpoint, traffic $split"
"""
