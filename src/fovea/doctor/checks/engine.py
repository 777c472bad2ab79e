"""Checks of the engine: it starts, in which precision, on which kernels, with which built encoders."""

from __future__ import annotations

import re

from fovea.doctor.check import Check, Need, Verdict, failed, not_applicable, passed, plural, size, warned
from fovea.doctor.subject import Subject

READY = re.compile(r"ready: [^\n]* on (\S+), ([^)\n]*)\), context")
"""The line of the server's log that names its kernels."""
SLOW = ("TorchKernels",)
LOSSY = ("int8", "int4", "fp8")


def ready(subject: Subject) -> Verdict:
    """Does the server start, and say that it serves requests?"""
    server = subject.server
    # Other servers of OpenAI's API have only some of these paths.
    for path in ("/ready", "/health", "/v1/models"):
        answer = server.get(path)
        if answer.status != 404:
            break
    if answer.status != 200:
        return failed(f"status {answer.status}", answer.message, "read the server's log")
    if subject.launcher is not None:
        return passed(f"ready after {subject.launcher.ready_seconds:.1f} s")
    return passed(f"status {answer.status}")


def precision(subject: Subject) -> Verdict:
    """Does the model run in the fastest type that keeps its answers?"""
    card = subject.server.card()
    dtype, lossy = str(card.get("dtype", "")), str(card.get("quantization", "") or "none")
    if not dtype:
        return not_applicable("the server does not tell its precision")
    if lossy in LOSSY:
        return warned(
            f"{dtype}, {lossy}",
            "weights in this type change answers; measure by how much before you serve them",
            f"fovea eval --quantization {lossy}, and the same without it",
        )
    if dtype == "float32" and subject.settings is not None and _has_faster(subject):
        if str(subject.setting("dtype")) == "auto":
            return warned(
                dtype,
                "the checkpoint is stored so; bfloat16 is faster on this machine, in half of the memory",
                "--dtype bfloat16, if `fovea eval` shows no loss",
            )
        return warned(dtype, "this machine computes faster in bfloat16", "--dtype auto")
    return passed(f"{dtype}, quantization {lossy}")


def kernels(subject: Subject) -> Verdict:
    """Does the model run on the fastest kernels of this machine?"""
    if subject.server.card().get("dtype") == "float32" and not subject.kernels().gpus:
        return not_applicable("the fastest kernels compute in bfloat16: see engine/precision")
    facts, chosen = subject.kernels(), str(subject.setting("kernels"))
    best = "flashinfer or triton" if facts.gpus else "native"
    if not facts.gpus and (not facts.instruction_set or facts.failure):
        return not_applicable("the C++ kernels cannot run here: see machine/native-kernels")
    if chosen != "auto" and chosen not in best:
        return warned(chosen, f"{best} is faster here", "--kernels auto")
    assert subject.launcher is not None
    running = READY.search(subject.launcher.log())
    if running is None:
        return passed(f"{chosen}: {best if chosen == 'auto' else chosen}")
    device, name = running.groups()
    if name.split()[0] in SLOW:
        return warned(
            f"{name} on {device}",
            f"{best} is faster here",
            "the server's log says why; --kernels native makes it an error",
        )
    return passed(f"{name} on {device}")


def cuda_graphs(subject: Subject) -> Verdict:
    """Are decode steps recorded as CUDA graphs?"""
    if not subject.kernels().gpus:
        return not_applicable("CUDA graphs are for GPUs")
    chosen = str(subject.setting("decode_graphs"))
    if chosen != "auto":
        return warned(chosen, "each kernel of a step is launched by itself", "--decode-graphs auto")
    return passed(chosen)


def built_engines(subject: Subject) -> Verdict:
    """Are encoders built ahead of time intact, and used?"""
    assert subject.built is not None
    facts, chosen = subject.built(), str(subject.setting("encoder_engines"))
    if chosen in ("off", ""):
        if not facts.exists:
            return not_applicable("no encoders are built, and none are wanted")
        return warned(
            f"{plural(facts.grids, 'grid')} in {facts.folder}", "they are not used", "--encoder-engines auto"
        )
    if not facts.exists:
        return failed(f"none in {facts.folder}", "the settings want them", "fovea build MODEL")
    if facts.problems:
        return failed(f"{plural(len(facts.problems), 'problem')}", facts.problems[0], "fovea build MODEL")
    used = int(subject.server.metrics().get("fovea:encoder_engines", 0))
    if not used:
        return failed(
            f"0 of {plural(facts.grids, 'grid')} in use", "the server's log says why", "fovea build MODEL"
        )
    return passed(f"{used} of {plural(facts.grids, 'grid')} in use")


def memory(subject: Subject) -> Verdict:
    """Does the largest step fit into the GPU's memory?"""
    values = subject.server.metrics() if subject.server.is_fovea else {}
    if "fovea:memory_total_bytes" not in values:
        return not_applicable("only the memory of a GPU is divided at the start")
    kv, step, spare = (values.get(f"fovea:memory_{name}_bytes", 0.0) for name in ("kv", "step", "spare"))
    failures, steps, images = (
        int(values.get(f"fovea:memory_{name}_total", 0)) for name in ("failures", "retries", "image_retries")
    )
    figure = f"KV {size(kv)}, largest step {size(step)}, {size(max(0.0, spare))} unused"
    advice = "a smaller --kv-cache-mib, --max-step-tokens or --max-running"
    if failures:
        return failed(figure, f"{plural(failures, 'request')} did not fit even alone", advice)
    if spare < 0:
        return warned(figure, f"{size(-spare)} are missing for the largest step", advice)
    if steps or images:
        reason = f"{plural(steps, 'step')} and {plural(images, 'image')} did not fit and were tried again"
        return warned(figure, f"{reason}; another process may use the GPU", advice)
    return passed(figure)


def failures(subject: Subject) -> Verdict:
    """Has no step of the engine failed?"""
    if not subject.server.is_fovea:
        return not_applicable("only Fovea counts failed steps")
    values = subject.server.metrics()
    failed_steps = int(values.get("fovea:failed_steps_total", 0))
    broken = int(values.get("fovea:integrity_errors_total", 0))
    figure = f"{plural(failed_steps, 'failed step')}, {plural(broken, 'integrity error')}"
    if failed_steps or broken:
        return failed(figure, "each is a defect that ended requests", "read the server's log, and report it")
    return passed(figure)


def _has_faster(subject: Subject) -> bool:
    facts = subject.kernels()
    return bool(facts.gpus or (facts.instruction_set and not facts.failure))


CHECKS = (
    Check("engine", "ready", "the server is ready", ready),
    Check("engine", "precision", "type of weights and activations", precision),
    Check("engine", "kernels", "kernels in use", kernels, (Need.OWN, Need.SETTINGS)),
    Check("engine", "cuda-graphs", "CUDA graphs", cuda_graphs, (Need.OWN, Need.SETTINGS)),
    Check(
        "engine", "built-engines", "encoders built ahead of time", built_engines, (Need.OWN, Need.SETTINGS)
    ),
    Check("engine", "memory", "memory of the GPU", memory),
    Check("engine", "failures", "failed steps", failures),
)
