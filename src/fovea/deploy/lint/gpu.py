"""Checks of MIG: layouts that fit on their GPU, and resources that exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fovea.core.errors import ConfigError
from fovea.deploy.gpus import MIG_PROFILES, mig_fits, mig_resource
from fovea.deploy.lint.objects import Cluster, Object, fields_of

GPU_OF = "fovea/gpu."
"""Prefix of the annotations that name the GPU of each layout."""
RESOURCES = {"nvidia.com/gpu", *(mig_resource(name) for names in MIG_PROFILES.values() for name in names)}


def check(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for every fault."""
    for each in cluster.of("ConfigMap"):
        text = fields_of(each.data.get("data")).get("config.yaml")
        if text is not None:
            config = fields_of(yaml.safe_load(str(text)))
            yield from _layouts(each, fields_of(config.get("mig-configs")))
    for pods in cluster.pods():
        for container in pods.containers:
            for name in fields_of(fields_of(container.get("resources")).get("limits")):
                if name.startswith("nvidia.com/") and name not in RESOURCES:
                    yield f"{pods.owner}: no GPU has the resource {name}"


def _layouts(config: Object, layouts: Mapping[str, Any]) -> Iterator[str]:
    for name, parts in layouts.items():
        gpu = str(config.annotations.get(f"{GPU_OF}{name}", ""))
        for part in parts or []:
            wanted = fields_of(fields_of(part).get("mig-devices"))
            if not wanted:
                continue
            if not gpu:
                yield f"{config}: the layout {name} has no annotation {GPU_OF}{name} that names its GPU"
                continue
            profiles = [profile for profile, count in wanted.items() for _ in range(int(count))]
            try:
                good = mig_fits(gpu, profiles)
            except ConfigError as error:
                yield f"{config}: layout {name}: {error.message}"
                continue
            if not good:
                yield f"{config}: layout {name}: {', '.join(profiles)} do not fit on one {gpu}"
