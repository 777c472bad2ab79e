"""Checks of the checkpoint: does it load, does it fit into memory, can it change by itself?"""

from __future__ import annotations

from fovea.doctor.check import MIB, Check, Need, Verdict, failed, not_applicable, passed, plural, size, warned
from fovea.doctor.subject import CheckpointFacts, Subject

BYTES = {"int8": 1.1, "int4": 0.6, "fp8": 1.1}
"""Bytes per weight of the lossy types, scales included."""
POOLS = (
    "embed_cache_mib", "region_cache_mib", "pixel_pool_mib", "fetch_cache_mib", "decoded_cache_mib",
    "image_store_mib", "response_store_mib", "state_cache_mib",
)  # fmt: skip
"""Settings of the stores in host memory, beside KV."""
MOST_KV = 4 << 30
ROOM_ON_GPU = 0.8
"""Share of a GPU's free memory that weights may take."""


def checkpoint(subject: Subject) -> Verdict:
    """Would the checkpoint load, and answer a question about an image?"""
    facts = _facts(subject)
    name = facts.figures.get("architecture", "an unknown architecture")
    if facts.errors:
        more = f", and {plural(len(facts.errors) - 1, 'more error')}" if len(facts.errors) > 1 else ""
        return failed(
            plural(len(facts.errors), "error"), facts.errors[0] + more, f"fovea models --check {facts.name}"
        )
    doubts = [*facts.warnings, *facts.unchecked]
    if doubts:
        return warned(
            f"{name}, {plural(len(doubts), 'doubt')}", doubts[0], f"fovea models --check {facts.name}"
        )
    return passed(f"{name}, {plural(int(facts.figures.get('tensors', 0)), 'tensor')}")


def memory(subject: Subject) -> Verdict:
    """Do weights, KV pool and caches fit into the free memory at the same time?"""
    facts = _facts(subject)
    parameters = facts.figures.get("parameters")
    if not isinstance(parameters, int):
        return not_applicable("the number of parameters is not known: see model/checkpoint")
    if subject.kernels().gpus:
        return _gpu_memory(subject, facts)
    weights = _bytes_of_weights(subject, facts)
    free = subject.machine.free_memory()
    kv_mib = int(subject.setting("kv_cache_mib"))
    kv = kv_mib * MIB if kv_mib else min(MOST_KV, (free - weights) / 4)
    pools = sum(int(subject.setting(name)) * MIB for name in POOLS)
    figure = f"weights {size(weights)}, KV {size(max(0, kv))}, caches up to {size(pools)}; {size(free)} free"
    if weights > free:
        return failed(figure, "the weights alone do not fit", "--quantization int4, or more memory")
    if weights + kv > free:
        return failed(figure, "weights and KV do not fit", "--kv-cache-mib 0, or a smaller one")
    if weights + kv + pools > free:
        return warned(
            figure,
            "caches are filled as they are used; when they are full, memory is not enough",
            "lower --pixel-pool-mib, --embed-cache-mib or --kv-cache-mib",
        )
    return passed(figure)


def _gpu_memory(subject: Subject, facts: CheckpointFacts) -> Verdict:
    """Judge the weights on the first GPU. The server divides the rest of its memory at its start."""
    output = subject.machine.output(
        ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    )
    first = (output or "").strip().partition("\n")[0].strip()
    stored = facts.figures.get("weight_bytes")
    if not first.isdigit() or not isinstance(stored, int):
        return not_applicable("the free memory of the GPU, or the size of the weights, is not known")
    lossy = str(subject.setting("quantization")) in BYTES or "quantization" in facts.figures
    weights = _bytes_of_weights(subject, facts) if lossy else stored
    free = int(first) * MIB
    figure = f"weights {size(weights)}; {size(free)} free on the GPU"
    if weights > free:
        return failed(figure, "the weights do not fit", "--quantization fp8, or a GPU with more memory")
    if weights > ROOM_ON_GPU * free:
        return warned(
            figure, "little is left for KV and activations", "--quantization fp8, or a GPU with more memory"
        )
    return passed(figure)


def revision(subject: Subject) -> Verdict:
    """Is the checkpoint one that does not change by itself?"""
    facts = _facts(subject)
    if facts.is_folder:
        return passed("none is needed: a folder does not change by itself")
    chosen = str(subject.setting("revision"))
    if not chosen:
        return warned(
            "a hub id without a revision", "it changes when its owner changes it", "--revision COMMIT"
        )
    return passed(f"revision {chosen}")


def _facts(subject: Subject) -> CheckpointFacts:
    assert subject.checkpoint is not None
    return subject.checkpoint()


def _bytes_of_weights(subject: Subject, facts: CheckpointFacts) -> float:
    """Return the bytes of all weights in memory. Weights that are quantized already may keep their codes."""
    parameters = int(facts.figures["parameters"])
    if str(subject.setting("quantization")) != "none":
        return parameters * _bytes_per_weight(subject, facts)
    kept = int(facts.figures.get("kept_parameters", 0))
    codes = int(facts.figures.get("kept_bytes", 0))
    return codes + (parameters - kept) * _bytes_per_weight(subject, facts)


def _bytes_per_weight(subject: Subject, facts: CheckpointFacts) -> float:
    lossy = str(subject.setting("quantization"))
    if lossy in BYTES:
        return BYTES[lossy]
    dtype = str(subject.setting("dtype"))
    if dtype == "auto":
        stored = str(facts.figures.get("dtype", ""))
        dtype = stored if stored == "float32" or subject.kernels().instruction_set else "float32"
    return 4.0 if dtype == "float32" else 2.0


CHECKS = (
    Check("model", "checkpoint", "the checkpoint loads", checkpoint, (Need.MODEL,)),
    Check("model", "memory", "it fits into memory", memory, (Need.MODEL, Need.SETTINGS)),
    Check("model", "revision", "it does not change by itself", revision, (Need.MODEL, Need.SETTINGS)),
)
