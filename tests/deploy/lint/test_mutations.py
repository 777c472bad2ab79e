"""Every rule of the linter finds the mistake that it is for: one change of a rendered file, one fault."""

import re

import pytest

from fovea.deploy.lint import lint
from tests.deploy import manifests

B, H, KEDA = "kubernetes/base", "kubernetes/overlays/hpa", "kubernetes/overlays/keda"
HPA = "kubernetes/components/hpa/autoscalers.yaml"
SCALED = "kubernetes/components/keda/scaled-objects.yaml"
MONITORS = "kubernetes/components/monitoring/pod-monitors.yaml"
MIG = "kubernetes/gpu-operator/mig-parted.yaml"
POOL, NET = f"{B}/pool-qwen.yaml", f"{B}/network.yaml"
FIXED, KNATIVE = "kserve/overlays/fixed", "kserve/overlays/knative"
GROUPS, LWS = "leaderworkerset/overlays/hpa", "leaderworkerset/base/pool-qwen.yaml"

MUTATIONS = [
    # (folder, file, pattern, replacement, words of the fault)
    (H, POOL, "terminationGracePeriodSeconds: 80", "terminationGracePeriodSeconds: 70", "take 70 s"),
    (H, f"{B}/config/vlm-qwen.toml", r"drain_seconds = 60.0", "drain_seconds = 600.0", "take 610"),
    (H, POOL, "port: 8000", "port: 8001", "startupProbe asks port 8001; ports of the pod: 8000, http1"),
    (H, POOL, r"livenessProbe:(\s+httpGet:\s+path: )/health", r"livenessProbe:\1/ready",
     "would be restarted"),
    (H, POOL, "readinessProbe:", "readynessProbe:", "has no readinessProbe"),
    (H, POOL, "runAsNonRoot: true", "runAsNonRoot: false", "may run as root"),
    (H, POOL, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false",
     "lacks readOnlyRootFilesystem"),
    (H, POOL, "- ALL", "- NET_RAW", "lacks capabilities drop ALL"),
    (H, POOL, "type: RuntimeDefault", "type: Unconfined", "seccompProfile is not RuntimeDefault"),
    (H, POOL, "enableServiceLinks: false", "enableServiceLinks: true", "would set FOVEA_PORT"),
    (H, POOL, "emptyDir:\n +sizeLimit: 20Gi", "hostPath:\n            path: /x", "is a hostPath"),
    (H, POOL, "name: vlm-qwen-config", "name: vlm-qwen-conf", "ConfigMap 'vlm-qwen-conf' does not exist"),
    (H, POOL, "name: vlm-engine-key", "name: vlm-key", "Secret 'vlm-key' does not exist"),
    (H, POOL, "serviceAccountName: vlm-engine", "serviceAccountName: x", "serviceAccountName 'x'"),
    (H, POOL, "priorityClassName: vlm-serving", "priorityClassName: x", "priorityClassName 'x'"),
    (H, POOL, "- name: scratch\n +mountPath: /tmp", "- name: tmp\n              mountPath: /tmp",
     "is not a volume"),
    (H, POOL, "3g.20gb: 1\n +limits", "3g.20gb: 2\n            limits", "given whole"),
    (H, POOL, "nvidia.com/mig-3g.20gb", "nvidia.com/mig-9g.20gb", "no GPU has the resource"),
    (H, POOL, "(template:\n(.*\n)*? +fovea-pool: )qwen\n", r"\1other\n",
     "does not match the labels of its own"),
    (H, POOL, "maxUnavailable: 1\n +unhealthy", "maxUnavailable: 0\n  unhealthy", "no node with such a pod"),
    (H, POOL, "maxUnavailable: 1\n +unhealthy", "minAvailable: 2\n  unhealthy",
     "minAvailable is 2 of 2 pods"),
    (H, POOL, "spec:\n  strategy:", "spec:\n  replicas: 2\n  strategy:", "has replicas of its own"),
    (H, f"{B}/service.yaml", "component: gateway", "component: proxy", "its selector finds no pods"),
    (H, NET, "component: redis", "component: rediss", "its podSelector finds no pods"),
    (H, NET, "port: http1", "port: http", "port 'http' is not a port of"),
    (H, NET, " +- 169.254.0.0/16\n", "", "reaches 169.254.169.254, the metadata service"),
    (H, NET, "- Ingress\n    - Egress\n  ingress: \\[\\]\n  egress: \\[\\]", "- Ingress",
     "denies all that others"),
    (H, NET, "- 2002::/16", "- ::ffff:0:0/96", "is an IPv4-mapped address, which Kubernetes refuses"),
    (H, NET, "- 2002::/16", "- fc00::/7", "fc00::/7 in `except` is not a part of 2000::/3"),
    (H, NET, "cidr: 0.0.0.0/0", "cidr: everywhere", "'everywhere' does not appear to be an IPv4 or IPv6"),
    (H, HPA, "maxReplicas: 6", "maxReplicas: six", "a field has a value that cannot be read"),
    (H, MONITORS, "port: http1", "port: metrics", "port 'metrics' is not a port"),
    (H, MONITORS, "name: vlm-metrics", "name: vlm-key", "Secret 'vlm-key' does not exist"),
    (H, HPA, "name: fovea_requests_waiting\n", "name: triton_request_queue_depth\n", "Fovea has no metric"),
    (H, HPA, "kind: Deployment\n    name: vlm-qwen\n", "kind: Deployment\n    name: x\n",
     "Deployment 'x' does not"),
    (H, HPA, "type: Pods\n      pods:\n        metric:\n          name: fovea_requests_waiting\n",
     "type: Resource\n      resource:\n        name: nvidia.com/gpu\n", "Resource metrics are cpu and"),
    (H, HPA, "minReplicas: 2", "minReplicas: 20", "maxReplicas is below minReplicas"),
    (KEDA, SCALED, "fovea:requests_waiting{", "fovea:queue_depth{", "Fovea has no metric fovea:queue_depth"),
    (KEDA, SCALED, "pollingInterval", "pollInterval", "unknown field 'pollInterval'"),
    (KEDA, SCALED, "threshold: '8'", "threshold: 8", "threshold is 8; accepted: a text"),
    ("kubernetes/gpu-operator", MIG, "mig-configs:", "mig-configs: [", "that cannot be read"),
    ("kubernetes/gpu-operator", MIG, "3g.20gb: 2", "3g.20gb: 3", "do not fit on one A100-40GB"),
    ("kubernetes/gpu-operator", MIG, "3g.20gb: 2", "3g.40gb: 2", "profiles of A100-40GB: 1g.5gb"),
    (FIXED, "kserve/base/pool-qwen.yaml", "maxReplicas: 6", "maxReplicas: 1", "maxReplicas is below"),
    (FIXED, "kserve/base/pool-qwen.yaml", "fovea:requests_waiting{", "up{", "names no metric of Fovea"),
    (KNATIVE, "kserve/overlays/knative/kustomization.yaml", "value: 10\n", "value: 110\n",
     "is 110; accepted: 0"),
    (KNATIVE, "kserve/overlays/knative/kustomization.yaml", "/spec/predictor/auto", "/spec/x/auto",
     "a patch names"),
    (GROUPS, LWS, "size: 1", "sizes: 1", "unknown field 'sizes'"),
    ("istio", "istio/routes.yaml", "weight: 90\n", "weight: 80\n", "the weights add up to 90"),
    ("istio", "istio/routes.yaml", " +weight: 10\n", "", "a destination without weight gets no request"),
    ("istio", "istio/routes.yaml", "networking.istio.io/v1\n", "networking.istio.io/v1beta1\n",
     "accepted: networ"),
    ("istio", "istio/routes.yaml", "refused-stream", "5xx", "other requests may have been computed"),
    ("istio", "istio/routes.yaml", " +retries:\n.*\n.*\n", "", "what Istio does by default"),
    ("istio", "istio/routes.yaml", "subset: v2\n", "subset: v3\n", "has a subset 'v3'"),
    ("istio", "istio/routes.yaml", "timeout: 600s", "timeout: 10 minutes", "accepted: a duration"),
    ("gateway-api/inference-pool", "gateway-api/inference-pool/pools.yaml", " +port:\n +number: 9002\n", "",
     "names a Service without its port"),
    ("gateway-api/inference-pool", "gateway-api/inference-pool/pools.yaml", "name: fovea-fovea-tiny\n",
     "name: x\n", "does not exist"),
    ("gateway-api/service", "gateway-api/service/route.yaml", "sectionName: https", "sectionName: tls",
     "has no listener 'tls'"),
]  # fmt: skip


def spec_of(folder: str) -> str:
    """Return the spec whose files a mutation changes."""
    return "no-gateway" if folder.startswith(("istio", "gateway-api")) else "full"


@pytest.mark.parametrize(
    ("folder", "file", "pattern", "replacement", "words"),
    MUTATIONS,
    ids=[f"{number}-{each[4].replace('/', ' ')}" for number, each in enumerate(MUTATIONS)],
)
def test_a_mutation_is_found(folder: str, file: str, pattern: str, replacement: str, words: str) -> None:
    files = manifests.files(spec_of(folder))
    changed = re.sub(pattern, replacement, files[file])
    assert changed != files[file]
    faults = lint({**files, file: changed}, folder)
    assert any(words in fault for fault in faults), faults


def test_a_file_that_is_missing_or_broken_is_named() -> None:
    files = manifests.files("small")
    folder, file = "kubernetes/overlays/fixed", "kubernetes/base/service.yaml"
    rest = {path: text for path, text in files.items() if path != file}
    assert lint(rest, folder) == [f"{file} is named, but does not exist"]
    assert "is not YAML" in lint({**files, file: "a: ["}, folder)[0]
    assert "accepted: objects of Kubernetes" in lint({**files, file: "- a"}, folder)[0]
    assert lint({}, "nowhere") == ["nowhere is named, but does not exist"]
