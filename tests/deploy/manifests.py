"""Rendered manifests for tests: folders that are checked together, and random specs."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.deploy.gpus import GPUS, MIG_PROFILES
from fovea.deploy.spec import DeploySpec, Gateway, Monitoring, Pool, Redis, Scale, Stop
from fovea.deploy.tables import Kubernetes, Tracing
from fovea.deploy.target import Files, render
from tests.deploy.specs import FULL, SMALL

TARGETS = ("kubernetes", "leaderworkerset", "kserve", "rayservice", "gateway-api", "istio")
NO_GATEWAY = DeploySpec(
    pools=(Pool(name="v1", replicas=9), Pool(name="v2", replicas=1)),
    tls=True,
    monitoring=Monitoring(),
    kubernetes=Kubernetes(tls_ends="gateway"),
)
"""Two versions of one model without a gateway, and TLS."""
SECURE = DeploySpec(
    pools=(
        Pool(name="qwen", model="Qwen/Qwen3-VL-4B-Instruct", hardware="cuda", gpu="L4", weights_gib=60),
        Pool(name="own", model="/models/own", weights_image="registry.example.com/own:1"),
    ),
    tls=True,
    gateway=Gateway(replicas=2),
    redis=Redis(disk_gib=5),
    monitoring=Monitoring(),
    tracing=Tracing(),
    kubernetes=Kubernetes(issuer="letsencrypt", storage_class="fast"),
)
"""Pods that end TLS, shared weights, a disk for Redis, and traces."""
SPECS = {"full": FULL, "small": SMALL, "no-gateway": NO_GATEWAY, "secure": SECURE}


@cache
def files(spec: str) -> Files:
    """Return the files of all targets for one of SPECS that do not refuse it."""
    return rendered(SPECS[spec])


def folders(rendered: Files) -> list[str]:
    """Return the folders that are applied as a whole."""
    builds = {path.rpartition("/")[0] for path in rendered if path.endswith("/kustomization.yaml")}
    parts = ("/base", "/components/", "/sidecar")
    return sorted(
        [each for each in builds if not any(part in f"{each}/" for part in parts)]
        + ["kubernetes/gpu-operator"] * ("kubernetes/gpu-operator/mig-parted.yaml" in rendered)
    )


@st.composite
def pools(draw: st.DrawFn, name: str, model: str) -> Pool:
    """A pool of any kind."""
    cuda = draw(st.booleans())
    gpu = draw(st.sampled_from(("", *GPUS))) if cuda else ""
    mig = draw(st.sampled_from(("", *MIG_PROFILES.get(gpu, ())))) if gpu else ""
    replicas = draw(st.integers(1, 5))
    return Pool(
        name=name,
        model=model,
        hardware="cuda" if cuda else "cpu",
        gpu=gpu,
        mig=mig,
        replicas=replicas,
        max_replicas=draw(st.sampled_from((0, replicas, replicas + 7))),
        spot=draw(st.booleans()),
        spot_notice_s=draw(st.sampled_from((10, 30, 120))),
        disk_gib=draw(st.sampled_from((1, 50, 51, 500))),
        weights_gib=draw(st.sampled_from((0, 100))),
    )


@st.composite
def specs(draw: st.DrawFn) -> DeploySpec:
    """A valid spec."""
    gateway = draw(st.sampled_from((None, Gateway(), Gateway(replicas=3))))
    models = ("a/Model-1", "b/model_2.0-Instruct") if gateway is not None else ("a/Model-1",)
    number = draw(st.integers(1, 3))
    some = [draw(pools(f"pool{count}", draw(st.sampled_from(models)))) for count in range(number)]
    stop = Stop(
        draw(st.integers(0, 40)),
        draw(st.integers(0, 40)),
        draw(st.integers(1, 900)),
        draw(st.integers(1, 30)),
    )
    return DeploySpec(
        pools=tuple(some),
        name=draw(st.sampled_from(("fovea", "a", "a-name-of-thirty-characters-xx"))),
        namespace=draw(st.sampled_from(("", "other"))),
        tls=draw(st.booleans()),
        kubernetes=Kubernetes(
            tls_ends=draw(st.sampled_from(("pods", "gateway"))),
            issuer=draw(st.sampled_from(("", "letsencrypt"))),
        ),
        tracing=draw(st.sampled_from((None, Tracing(), Tracing(backend="tempo.x:4317")))),
        gateway=gateway,
        redis=draw(st.sampled_from((None, Redis(), Redis(disk_gib=5)))) if gateway is not None else None,
        monitoring=draw(st.sampled_from((None, Monitoring(), Monitoring(retention_days=3)))),
        stop=stop,
        scale=Scale(shrink_after_s=draw(st.sampled_from((0, 300, 3600)))),
    )


def rendered(spec: DeploySpec) -> Files:
    """Return the files of all targets that do not refuse a spec."""
    found: Files = {}
    for target in TARGETS:
        try:
            found |= render(spec, [target])
        except ConfigError as error:
            if error.param != "tls_ends":
                raise
    return found
