"""Mistakes of published manifests, as the linter names them."""

import pytest
import yaml

from fovea.deploy.gpus import mig_fits
from fovea.deploy.lint import lint

DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: vlm-server}
spec:
  replicas: 3
  selector: {matchLabels: {app: vlm-server}}
  template:
    metadata: {labels: {app: vlm-server}}
    spec:
      containers:
        - name: triton
          image: nvcr.io/nvidia/tritonserver:24.01-vllm-python-py3
          resources: {limits: {nvidia.com/gpu: 1}, requests: {nvidia.com/gpu: 1}}
          ports: [{containerPort: 8000}]
"""
AUTOSCALER = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: vlm-hpa}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: vlm-server}
  minReplicas: 2
  maxReplicas: 10
  metrics:
    - type: Resource
      resource: {name: nvidia.com/gpu, target: {type: Utilization, averageUtilization: 70}}
    - type: Pods
      pods: {metric: {name: triton_request_queue_depth}, target: {type: AverageValue, averageValue: "50"}}
"""
ROUTES = """
apiVersion: networking.istio.io/v1beta1
kind: VirtualService
metadata: {name: vlm-service}
spec:
  hosts: [vlm.example.com]
  http:
    - match: [{headers: {x-experiment: {exact: model-v2}}}]
      route: [{destination: {host: vlm-server-v2, port: {number: 8000}}}]
    - route:
        - {destination: {host: vlm-server-v1, port: {number: 8000}}, weight: 90}
        - {destination: {host: vlm-server-v2, port: {number: 8000}}, weight: 10}
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (AUTOSCALER, "Resource metrics are cpu and memory, not 'nvidia.com/gpu'"),
        (AUTOSCALER, "no metric 'triton_request_queue_depth'"),
        (AUTOSCALER, "has replicas of its own"),
        (DEPLOYMENT, "has no startupProbe"),
        (DEPLOYMENT, "has no readinessProbe"),
        (DEPLOYMENT, "no limit of memory, or requests no CPU"),
        (DEPLOYMENT, "may run as root"),
        (ROUTES, "accepted: networking.istio.io/v1"),
        (ROUTES, "http[1] retries on what Istio does by default"),
        (ROUTES, "http[1] has no timeout"),
    ],
)
def test_a_published_manifest_has_the_fault(text: str, words: str) -> None:
    assert yaml.safe_load(text)
    faults = lint({"x/a.yaml": DEPLOYMENT, "x/b.yaml": text if text != DEPLOYMENT else ""}, "x")
    assert any(words in fault for fault in faults), faults


def test_the_weights_of_the_published_routes_are_right() -> None:
    assert not any("weight" in fault for fault in lint({"x/a.yaml": ROUTES}, "x"))


def test_the_published_mig_layout_does_not_fit_and_the_better_one_does() -> None:
    assert not mig_fits("A100-40GB", ["3g.20gb"] * 3)
    assert mig_fits("A100-40GB", ["3g.20gb", "2g.10gb", "2g.10gb"])
