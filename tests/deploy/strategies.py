"""Specs of all kinds for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fovea.deploy.gpus import GPUS, MIG_PROFILES
from fovea.deploy.spec import DeploySpec, Gateway, Monitoring, Pool, Redis, Stop

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", fullmatch=True)
MODELS = st.sampled_from(["fovea-tiny", "Qwen/Qwen3-VL-4B-Instruct", "/models/a b~c"[:9], "/srv/m-1.5/x"])
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(str.isprintable)
SETTINGS = st.dictionaries(
    st.sampled_from(["max_queue", "api_doc", "audit_log", "allowed_hosts", "temperature"]),
    TEXTS | st.integers(0, 10**6) | st.booleans() | st.floats(0, 1) | st.lists(TEXTS, max_size=3),
    max_size=3,
)


@st.composite
def pools(draw: st.DrawFn, name: str, served: str) -> Pool:
    """Return a pool that serves one model."""
    hardware = draw(st.sampled_from(["cpu", "cuda"]))
    gpu = draw(st.sampled_from(["", *GPUS])) if hardware == "cuda" else ""
    mig = draw(st.sampled_from(["", *MIG_PROFILES.get(gpu, ())]))
    replicas = draw(st.integers(1, 3))
    return Pool(
        name=name,
        model=draw(MODELS),
        served_name=served,
        hardware=hardware,
        gpu=gpu,
        mig=mig,
        replicas=replicas,
        max_replicas=draw(st.sampled_from([0, replicas, replicas + 3])),
        spot=draw(st.booleans()),
        spot_notice_s=draw(st.integers(10, 300)),
        settings=draw(SETTINGS),
    )


@st.composite
def specs(draw: st.DrawFn) -> DeploySpec:
    """Return a spec whose servers fit onto one machine."""
    names = draw(st.lists(LABELS, min_size=1, max_size=3, unique=True))
    gateway = draw(st.none() | st.builds(Gateway, replicas=st.integers(1, 3), settings=SETTINGS))
    served = draw(st.sampled_from(["", "vlm", "Org/Model_1.x"])) or "one"
    values: dict[str, Any] = {
        "name": draw(LABELS),
        "host": draw(st.sampled_from(["localhost", "vlm.example.com", "a-b.c1"])),
        "max_body_mib": draw(st.integers(1, 1024)),
        "max_answer_s": draw(st.integers(10, 86400)),
        "tls": draw(st.booleans()),
        "proxy_port": draw(st.sampled_from([80, 443, 8443, 65535])),
        "stop": draw(st.builds(Stop, pre_stop_s=st.integers(0, 300), drain_s=st.integers(1, 3600))),
        "monitoring": draw(
            st.none()
            | st.builds(
                Monitoring,
                scrape_s=st.integers(1, 300),
                grafana=st.booleans(),
                alert_webhook=st.sampled_from(["", "https://alerts.example.com/hook%20x"]),
            )
        ),
    }
    if gateway is not None and draw(st.booleans()):
        values["redis"] = draw(st.builds(Redis, memory_mib=st.integers(16, 1 << 20)))
    return DeploySpec(pools=tuple(draw(pools(name, served)) for name in names), gateway=gateway, **values)
