"""On which nodes a pool runs: its GPU, and spot or on-demand machines.

Clouds mark spot nodes in their own ways. Terms of a node affinity are alternatives, so one manifest names the
marks of all clouds, and no overlay for each cloud is needed.
"""

from __future__ import annotations

from typing import Any

from fovea.deploy.mig_layout import resource
from fovea.deploy.spec import Pool

SPOT = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
    ("karpenter.sh/capacity-type", "spot"),
)
"""Labels of spot nodes: GKE, EKS managed node groups, AKS, Karpenter."""
PRODUCTS = {
    "T4": ("Tesla-T4",),
    "L4": ("NVIDIA-L4",),
    "A10": ("NVIDIA-A10", "NVIDIA-A10G"),
    "L40S": ("NVIDIA-L40S",),
    "A30": ("NVIDIA-A30",),
    "A100-40GB": ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"),
    "H100-80GB": ("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"),
    "H100-96GB": ("NVIDIA-H100-96GB-HBM3", "NVIDIA-GH200-480GB"),
    "H200-141GB": ("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "B200-180GB": ("NVIDIA-B200",),
}
"""Values of the label nvidia.com/gpu.product, which the GPU operator sets: the driver's name of the GPU."""


def gpu_resources(pool: Pool) -> dict[str, int]:
    """The GPU resources of an engine."""
    if pool.hardware != "cuda":
        return {}
    return {resource(pool.mig): 1} if pool.mig else {"nvidia.com/gpu": 1}


def affinity(pool: Pool) -> dict[str, Any]:
    """The affinity of a pool's pods: to the product of its GPU, and to spot or on-demand nodes."""
    product = []
    if pool.hardware == "cuda" and pool.gpu:
        values = list(PRODUCTS[pool.gpu])
        product = [{"key": "nvidia.com/gpu.product", "operator": "In", "values": values}]
    if pool.spot:
        terms = [[{"key": key, "operator": "In", "values": [value]}] for key, value in SPOT]
    else:
        terms = [[{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT]]
    required = [{"matchExpressions": [*term, *product]} for term in terms]
    return {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": required}}
    }


def tolerations(pool: Pool) -> list[dict[str, str]]:
    """The taints of GPU and spot nodes that a pool's pods tolerate."""
    found = []
    if pool.hardware == "cuda":
        found.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if pool.spot:
        found += [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT
        ]
    return found


def spread(selector: dict[str, str]) -> list[dict[str, Any]]:
    """Spread pods over zones and nodes, as far as there is room."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]
