"""The rendered deployment of a chaos day: `fovea deploy render --target local`, with proxies in between."""

from __future__ import annotations

from pathlib import Path

from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis, Stop
from fovea.deploy.target import render
from fovea.deploy.write import write

ENGINE_PORT, GATEWAY_PORT, PROXY_PORT = 18000, 18080, 18090
REDIS_PORT = GATEWAY_PORT + 100
MOVED = 1000
"""Engines and Redis listen so much above their rendered ports, on which the proxies listen."""
WORKERS = 2
TOTAL_S, IDLE_S, FIRST_BYTE_S = 25, 8.0, 15.0
"""Times after which the gateway gives up a request, a silent stream, and a stream without a first byte."""
ENGINE = {
    "threads": 1,
    "kv_cache_mib": 128,
    "embed_cache_mib": 8,
    "pixel_pool_mib": 64,
    "pixel_cache_mib": 4,
    "decoded_cache_mib": 8,
    "fetch_cache_mib": 4,
    "region_cache_mib": 4,
    "image_store_mib": 4,
    "response_store_mib": 4,
    "embed_disk_mib": 4,
    "batch_store_mib": 24,
    "image_workers": 1,
    "video_workers": 1,
    "max_running": 16,
    "max_queue": 64,
    "fetch_timeout_s": 4.0,
}
"""Small pools and caches, so that they are full after the warm-up."""
GATEWAY = {
    "workers": WORKERS,
    "idle_s": IDLE_S,
    "first_byte_s": FIRST_BYTE_S,
    "connect_s": 3.0,
    "breaker_open_s": 3.0,
    "slow_start_s": 2.0,
    "probe_every_s": 1.0,
    "requests_per_backend": 8,
    "outlier_eject_s": 5.0,
    "response_cache_mib": 2,
    "response_cache_wait_s": 5.0,
    "accounts_on_failure": "local",
}
HTTP = {"keep_alive_s": 6.0, "body_timeout_s": 6.0, "write_timeout_s": 6.0, "header_timeout_s": 5.0}
"""Short times, so that connections that a fault has left open are closed during the pause at the end."""


def spec(disk: Path, cache: Path, keys: Path, audit: Path, *, private_hosts: bool) -> DeploySpec:
    """Return the spec of the stack: two pools of one engine each, which serve one model.

    disk: folder of batches and usage. cache: of encoder outputs. keys, audit: files.
    """
    hosts = {"allow_private_hosts": private_hosts}
    pools = tuple(
        Pool(
            name=name,
            cpus=1,
            memory_gib=2,
            settings={
                **ENGINE,
                **HTTP,
                **hosts,
                "batch_dir": str(disk / name),
                "embed_disk_dir": str(cache / "embeds"),
            },
        )  # fmt: skip
        for name in ("one", "two")
    )
    files = {"keys_file": str(keys), "usage_file": str(disk / "usage.db"), "audit_log": str(audit)}
    return DeploySpec(
        pools=pools,
        name="chaos",
        host="localhost",
        engine_port=ENGINE_PORT,
        gateway_port=GATEWAY_PORT,
        proxy_port=PROXY_PORT,
        max_answer_s=TOTAL_S,
        gateway=Gateway(settings={**GATEWAY, **HTTP, **hosts, **files}),
        redis=Redis(memory_mib=32),
        stop=Stop(pre_stop_s=0, lame_duck_s=0, drain_s=2, margin_s=5),
    )


def write_deployment(folder: Path, rendered: DeploySpec) -> None:
    """Render the stack into a folder, and move the ports of engines and Redis.

    Raises ValueError if a rendered file has no such port.
    """
    write(render(rendered, ["local"]), folder)
    for name, port in (("engine-one-0", ENGINE_PORT), ("engine-two-0", ENGINE_PORT + 1)):
        _replace(folder / f"{name}.toml", f"port = {port}\n", f"port = {port + MOVED}\n")
    _replace(folder / "redis.conf", f"port {REDIS_PORT}\n", f"port {REDIS_PORT + MOVED}\n")


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{file.name} does not hold {old!r} once")
    file.write_text(text.replace(old, new))
