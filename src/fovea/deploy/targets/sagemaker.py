"""SageMaker: the entry point of the container, and an endpoint as a template of CloudFormation."""

from __future__ import annotations

import json
import re
from typing import Any

from fovea.core.errors import ConfigError
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
    user = "# SageMaker mounts the model for root, and says that containers run as root.\n"
    user += "# hadolint ignore=DL3002\nUSER 0"
    return {
        f"{FOLDER}/Dockerfile": cloud_dockerfile(spec, pool, FOLDER, ("entrypoint.sh", "fovea.toml"), user),
        f"{FOLDER}/entrypoint.sh": _entrypoint(pool),
        f"{FOLDER}/fovea.toml": server_config(spec, pool, comment, **limits),
        f"{FOLDER}/endpoint.json": json.dumps(_template(spec, pool), indent=2) + "\n",
        f"{FOLDER}/deploy.sh": _deploy(spec),
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


def _entrypoint(pool: Pool) -> str:
    return f"""\
#!/bin/sh
# Starts Fovea in a container of SageMaker, which runs the image with the argument "serve".
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)

fail() {{
  echo "entrypoint: $1" >&2
  exit 1
}}

[ "${{1:-}}" = serve ] || fail "the argument is '${{1:-}}'; accepted: serve"
data=${{SM_MODEL_DIR:-/opt/ml/model}}
model=${{FOVEA_MODEL:-{pool.model}}}
if [ -f "$data/config.json" ]; then
  model=$data
elif [ -n "$(ls -A "$data" 2>/dev/null)" ]; then
  fail "$data has no config.json; the model's archive has its files at the top, not in a folder"
fi
# exec: the server itself gets SIGTERM, and finishes the running requests.
exec fovea serve "$model" --config "$here/fovea.toml" --host 0.0.0.0 \\
  --port "${{SAGEMAKER_BIND_TO_PORT:-8080}}"
"""


def _template(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    """Return the template: model, endpoint configuration, endpoint and, with max_replicas, its scaling."""
    resources: dict[str, Any] = {
        "Model": {
            "Type": "AWS::SageMaker::Model",
            "Properties": {
                "ExecutionRoleArn": {"Ref": "Role"},
                "PrimaryContainer": {
                    "Image": {"Ref": "Image"},
                    "ModelDataUrl": {
                        "Fn::If": ["HasModelData", {"Ref": "ModelData"}, {"Ref": "AWS::NoValue"}]
                    },
                },
            },
        },
        "Configuration": {
            "Type": "AWS::SageMaker::EndpointConfig",
            "Properties": {"ProductionVariants": [_variant(spec, pool)]},
        },
        "Endpoint": {
            "Type": "AWS::SageMaker::Endpoint",
            "Properties": {
                "EndpointName": spec.name,
                "EndpointConfigName": {"Fn::GetAtt": ["Configuration", "EndpointConfigName"]},
            },
        },
    }
    if pool.max_replicas > pool.replicas:
        resources |= _scaling(spec, pool)
    role: dict[str, Any] = {"Type": "String", "Description": "ARN of the role of the endpoint."}
    if spec.cloud.role_arn:
        role["Default"] = spec.cloud.role_arn
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Endpoint {spec.name} with the model {pool.client_model} on Fovea.",
        "Parameters": {
            "Image": {"Type": "String", "Description": "Image in ECR."},
            "Role": role,
            "ModelData": {
                "Type": "String",
                "Default": "",
                "Description": "s3:// address of the model as tar.gz; empty: the spec's model.",
            },
        },
        "Conditions": {"HasModelData": {"Fn::Not": [{"Fn::Equals": [{"Ref": "ModelData"}, ""]}]}},
        "Resources": resources,
        "Outputs": {"Endpoint": {"Value": {"Fn::GetAtt": ["Endpoint", "EndpointName"]}}},
    }


def _variant(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    return {
        "VariantName": "main",
        "ModelName": {"Fn::GetAtt": ["Model", "ModelName"]},
        "InstanceType": instance_type(spec, pool),
        "InitialInstanceCount": pool.replicas,
        "InitialVariantWeight": 1,
        "ModelDataDownloadTimeoutInSeconds": START_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": START_S,
    }


def _scaling(spec: DeploySpec, pool: Pool) -> dict[str, Any]:
    dimension = "sagemaker:variant:DesiredInstanceCount"
    resource = {"Fn::Sub": "endpoint/${Endpoint.EndpointName}/variant/main"}
    return {
        "Scaling": {
            "Type": "AWS::ApplicationAutoScaling::ScalableTarget",
            "Properties": {
                "ServiceNamespace": "sagemaker",
                "ScalableDimension": dimension,
                "ResourceId": resource,
                "MinCapacity": pool.replicas,
                "MaxCapacity": pool.max_replicas,
            },
        },
        "ScalingPolicy": {
            "Type": "AWS::ApplicationAutoScaling::ScalingPolicy",
            "Properties": {
                "PolicyName": f"{spec.name}-concurrency",
                "PolicyType": "TargetTrackingScaling",
                "ScalingTargetId": {"Ref": "Scaling"},
                "TargetTrackingScalingPolicyConfiguration": {
                    "PredefinedMetricSpecification": {
                        "PredefinedMetricType": "SageMakerVariantConcurrentRequestsPerModelHighResolution"
                    },
                    "TargetValue": spec.scale.waiting_per_replica,
                    "ScaleInCooldown": spec.scale.shrink_after_s,
                },
            },
        },
    }


def _deploy(spec: DeploySpec) -> str:
    region = f" --region {spec.cloud.region}" if _REGION.fullmatch(spec.cloud.region) else ""
    role = "" if spec.cloud.role_arn else ' "Role=${ROLE:?set ROLE to the ARN of the execution role}"'
    return f"""\
#!/bin/sh
# Creates or updates the endpoint. IMAGE is in ECR; MODEL_DATA is the s3:// address of a tar.gz, or left out.
#
#   deploy.sh IMAGE [MODEL_DATA]
set -eu
here=$(cd -- "$(dirname -- "$0")" && pwd)
image=${{1:?usage: deploy.sh IMAGE [MODEL_DATA]}}
aws cloudformation deploy --stack-name {spec.name}{region} \\
  --template-file "$here/endpoint.json" \\
  --parameter-overrides "Image=$image" "ModelData=${{2:-}}"{role}
"""
