"""Checks of caches: are they large enough for the workload, and do they work?"""

from __future__ import annotations

from fovea.doctor.check import MIB, Check, Need, Verdict, failed, not_applicable, passed, size, warned
from fovea.doctor.subject import Subject

FLAGS = {
    "fetched": "--fetch-cache-mib", "decoded": "--decoded-cache-mib", "images": "--image-store-mib",
    "pixels": "--pixel-cache-mib", "encoder": "--embed-cache-mib", "regions": "--region-cache-mib",
    "disk": "--embed-disk-mib",
}  # fmt: skip
"""The setting of each cache of /admin/caches whose evictions cost time."""
FEW = 100
"""Evictions below this number tell nothing about the size of a cache."""


def kv_pool(subject: Subject) -> Verdict:
    """Does the KV pool hold the requests that may run at the same time?"""
    if not subject.server.is_fovea:
        return not_applicable("only Fovea tells the size of its pool")
    values = subject.server.metrics()
    tokens = int(values.get("fovea:kv_blocks_total", 0) * values.get("fovea:kv_block_tokens", 0))
    each = values.get("fovea:kv_block_bytes", 0.0) / max(1.0, values.get("fovea:kv_block_tokens", 1.0))
    context = int(subject.server.card().get("max_model_len") or 0)
    running = int(subject.setting("max_running")) if subject.settings is not None else 0
    request = subject.workload.tokens
    fitting = tokens // request
    figure = f"{tokens} tokens of {size(each)}, or {fitting} requests of {request} tokens"
    larger = "a larger --kv-cache-mib"
    if subject.settings is not None and subject.setting("kv_dtype") == "auto":
        larger += ", or --kv-dtype int8: nearly twice as many tokens"
    if tokens < request:
        return failed(figure, "not one request fits", larger)
    if tokens < context:
        return warned(
            figure,
            f"a request of the whole context ({context} tokens) does not fit",
            larger,
        )
    if tokens < running * request:
        return warned(
            figure,
            f"max_running is {running}: requests wait for each other's KV before that many run",
            f"--kv-cache-mib {int(running * request * each) // MIB + 1}, or --max-running {fitting}",
        )
    return passed(figure)


def encoder_outputs(subject: Subject) -> Verdict:
    """Does the cache of encoder outputs hold an image for every request that may run?"""
    values = subject.server.metrics() if subject.server.is_fovea else {}
    entries = values.get("fovea:embed_cache_entries", 0)
    capacity = values.get("fovea:embed_cache_capacity_bytes", 0)
    if "fovea:embed_cache_entries" not in values:
        return not_applicable("the server has no such cache")
    if not capacity:
        return warned("0 MiB", "an image in a second request is encoded again", "--embed-cache-mib 256")
    if not entries:
        return not_applicable("no image was encoded yet, so the size of an entry is not known")
    images = int(capacity / (values["fovea:embed_cache_bytes"] / entries))
    running = int(subject.setting("max_running")) if subject.settings is not None else 1
    figure = f"{size(capacity)}, or {images} images of the size seen so far"
    if images < running:
        return warned(figure, f"{running} requests may run, each with an image", "a larger --embed-cache-mib")
    return passed(figure)


def evictions(subject: Subject) -> Verdict:
    """Do caches keep their entries until they are used again?"""
    stages = subject.server.caches()
    if stages is None:
        return not_applicable("the server does not tell (/admin/caches; --admin-key)")
    small = [
        name
        for name in FLAGS
        if stages.get(name, {}).get("evictions", 0) > max(FEW, stages.get(name, {}).get("hits", 0))
    ]
    total = int(sum(stages.get(name, {}).get("evictions", 0) for name in FLAGS))
    hits = int(sum(stages.get(name, {}).get("hits", 0) for name in FLAGS))
    figure = f"{hits} hits, {total} evictions since the start"
    if small:
        flags = ", ".join(FLAGS[name] for name in small)
        return warned(figure, f"more evictions than hits in: {', '.join(small)}", f"larger values of {flags}")
    return passed(figure)


def disk(subject: Subject) -> Verdict:
    """Does the cache on disk work?"""
    values = subject.server.metrics() if subject.server.is_fovea else {}
    if not values.get("fovea:embed_disk_capacity_bytes"):
        return not_applicable("there is no cache on disk (--embed-disk-dir)")
    corrupt, dropped = (
        int(values.get(f"fovea:embed_disk_{name}_total", 0)) for name in ("corrupt", "dropped")
    )
    figure = f"{corrupt} damaged entries, {dropped} writes given up"
    if values.get("fovea:embed_disk_off"):
        return failed(figure, "it has turned itself off", "read the server's log: the folder cannot be used")
    if corrupt or dropped:
        return warned(figure, "entries are lost, and computed again", "check the disk: smartctl, dmesg")
    return passed(figure)


def media_bytes(subject: Subject) -> Verdict:
    """Do requests in flight fit into memory with the bytes of their images?"""
    wanted = int(subject.setting("max_media_mib")) << 20
    free = subject.machine.free_memory()
    figure = f"up to {size(wanted)} of media, {size(free)} free"
    if wanted > free:
        return warned(
            figure,
            "the images of requests may need more memory than is free",
            f"--max-media-mib {free // 2 >> 20}",
        )
    return passed(figure)


CHECKS = (
    Check("caches", "kv-pool", "KV pool for the workload", kv_pool),
    Check("caches", "encoder-outputs", "encoder outputs for the workload", encoder_outputs),
    Check("caches", "evictions", "evictions and hits", evictions),
    Check("caches", "disk", "cache on disk", disk),
    Check("caches", "media-bytes", "images of requests in flight", media_bytes, (Need.SETTINGS,)),
)
