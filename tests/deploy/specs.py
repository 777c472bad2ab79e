"""Specs for tests."""

from __future__ import annotations

from fovea.deploy.spec import DeploySpec, Gateway, Monitoring, Pool, Redis

SMALL = DeploySpec(pools=(Pool(name="tiny"),))
"""One engine with the bundled model on a CPU."""

FULL = DeploySpec(
    name="vlm",
    host="vlm.example.com",
    pools=(
        Pool(
            name="qwen",
            model="Qwen/Qwen3-VL-4B-Instruct",
            hardware="cuda",
            gpu="A100-40GB",
            mig="3g.20gb",
            replicas=2,
            max_replicas=6,
            cpus=8,
            memory_gib=48,
            settings={"max_queue": 64},
        ),
        Pool(
            name="qwen-spot",
            model="Qwen/Qwen3-VL-4B-Instruct",
            hardware="cuda",
            gpu="A100-40GB",
            mig="3g.20gb",
            replicas=4,
            max_replicas=12,
            spot=True,
        ),
        Pool(name="tiny", model="fovea-tiny", replicas=2),
    ),
    gateway=Gateway(replicas=2),
    redis=Redis(),
    monitoring=Monitoring(alert_webhook="http://alerts.example.com/hook", otlp_endpoint="http://otel:4318"),
)
"""Two models, spot and on-demand machines, MIG, a gateway with Redis, monitoring."""
