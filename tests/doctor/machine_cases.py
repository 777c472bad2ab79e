"""Machines, checkpoints and engines with one fault each, and the verdicts that they get."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from fovea.doctor.check import Status
from fovea.doctor.machine import Disk
from fovea.doctor.server import Answer
from fovea.doctor.subject import KernelFacts, Subject
from tests.doctor.case import Case, case
from tests.doctor.fakes import (
    BUILT,
    CARD,
    CHECKPOINT,
    GIB,
    KERNELS,
    METRICS,
    FakeLauncher,
    FakeMachine,
    FakeWeb,
    error,
    files,
    live,
    settings,
    subject,
)

PASS, WARN, FAIL, NONE = Status.PASS, Status.WARN, Status.FAIL, Status.NOT_APPLICABLE
GPU = KernelFacts("AVX-512", "", "13.0", 1)
NO_HEALTH = dict.fromkeys(("/ready", "/health"), Answer(404))
NOTHING = NO_HEALTH | {"/v1/models": Answer(404)}
PSTATE = "/sys/devices/system/cpu/intel_pstate/status"
INTEL = {**files(scaling_governor="powersave\n"), PSTATE: "active\n"}
"""With this driver powersave lets the processor run as fast as its load asks for."""
INT4 = settings(quantization="int4")
FLOAT32 = {**CARD, "dtype": "float32"}
ON_GPU = {
    **METRICS, "fovea:memory_total_bytes": 16 * GIB, "fovea:memory_kv_bytes": 8 * GIB,
    "fovea:memory_step_bytes": 2 * GIB, "fovea:memory_spare_bytes": GIB,
}  # fmt: skip
DRIVER = {"/proc/driver/nvidia/version": "NVRM version"}


def on(**changes: object) -> partial[Subject]:
    """A subject on a machine with other values."""
    return partial(subject, machine=FakeMachine(**changes))  # type: ignore[arg-type]


def kernels(facts: KernelFacts, **changes: object) -> partial[Subject]:
    """A subject with other facts about kernels."""
    return partial(subject, kernels=lambda: facts, **changes)


def checkpoint(**changes: object) -> partial[Subject]:
    """A subject with another checkpoint."""
    return partial(subject, checkpoint=lambda: replace(CHECKPOINT, **changes))


def setting(**changes: object) -> partial[Subject]:
    """A subject with other settings."""
    return partial(subject, settings=settings(**changes))


def answering(**changes: object) -> partial[Subject]:
    """A subject whose server has other metrics, or another model."""
    return partial(subject, FakeWeb(**changes))


def logging(name: str) -> partial[Subject]:
    """A subject whose server has logged that it runs on these kernels."""
    line = f"ready: eyes (Qwen3-VL, 8.8 M parameters, bfloat16 on cpu, {name}), context 8192\n"
    return partial(subject, launcher=FakeLauncher(Path("/nowhere"), log=line))


def gpu_with(free_mib: int) -> partial[Subject]:
    """A subject on a machine whose GPU has so many MiB free."""
    machine = FakeMachine(programs={"nvidia-smi": f"{free_mib}\n81000\n"})
    figures = {**CHECKPOINT.figures, "weight_bytes": 2 * 10**9}
    return partial(kernels(GPU), machine=machine, checkpoint=lambda: replace(CHECKPOINT, figures=figures))


CASES: list[Case] = [
    case("machine/instruction-set", PASS, subject, "AVX-512"),
    case("machine/instruction-set", WARN, kernels(KernelFacts("", "", "", 0)), "AVX2"),
    case("machine/instruction-set", NONE, kernels(GPU), "GPU"),
    case(
        "machine/instruction-set", WARN, kernels(replace(KERNELS, amx_refusal="Invalid argument")),
        "AVX-512; Invalid argument",
    ),
    case("machine/native-kernels", PASS, subject),
    case("machine/native-kernels", WARN, kernels(replace(KERNELS, failure="no compiler")), "no compiler"),
    case("machine/native-kernels", NONE, kernels(GPU)),
    case("machine/threads", PASS, subject, "4 cores"),
    case("machine/threads", PASS, partial(subject, settings=None), "4 cores"),
    case("machine/threads", FAIL, setting(threads=8), "threads: 8"),
    case("machine/threads", WARN, setting(threads=2), "2 cores are left idle"),
    case("machine/other-load", PASS, subject),
    case("machine/other-load", WARN, on(files=files(loadavg="1 9.5 1 1/1 1")), "9.5 programs"),
    case("machine/other-load", NONE, on(files=files(loadavg=None))),
    case("machine/memory", PASS, subject, "16.0 GiB"),
    case("machine/memory", FAIL, on(free=GIB // 2), "512.0 MiB"),
    case("machine/swap", PASS, subject, "0 bytes of 1.0 GiB"),
    case("machine/swap", WARN, on(files=files(meminfo="SwapTotal: 2048000 kB\nSwapFree: 0 kB\n")), "swapoff"),
    case("machine/swap", NONE, on(files=files(meminfo=None))),
    case("machine/huge-pages", PASS, subject, "madvise"),
    case("machine/huge-pages", WARN, on(files=files(enabled="always madvise [never]")), "never"),
    case("machine/huge-pages", NONE, on(files=files(enabled=None))),
    case("machine/cgroup-memory", PASS, subject, "limit 8.0 GiB, 0 processes"),
    case("machine/cgroup-memory", WARN, on(files=files(memory__events="oom_kill 1\n")), "1 process ended"),
    case("machine/cgroup-memory", NONE, on(files=files(memory__max="max\n"))),
    case("machine/cgroup-cpu", PASS, subject, "0% of 1000"),
    case("machine/cgroup-cpu", WARN, on(files=files(cpu__stat="nr_periods 10\nnr_throttled 4\n")), "40%"),
    case("machine/cgroup-cpu", NONE, on(files=files(cpu__stat=None))),
    case("machine/clock", PASS, subject, "tsc"),
    case("machine/clock", WARN, on(files=files(current_clocksource="hpet\n")), "hpet"),
    case("machine/clock", NONE, on(files=files(current_clocksource=None))),
    case("machine/frequency", PASS, subject, "performance"),
    case("machine/frequency", WARN, on(files=files(scaling_governor="powersave\n")), "cpupower"),
    case("machine/frequency", PASS, on(files=INTEL), "powersave"),
    case("machine/frequency", NONE, on(files=files(scaling_governor=None))),
    case("machine/cache-disk", PASS, subject, "50.0 GiB free on ext4"),
    case("machine/cache-disk", PASS, setting(embed_disk_dir="/cache", embed_disk_mib=1024), "/cache"),
    case("machine/cache-disk", FAIL, on(disk_value=Disk(GIB, "ext4", False)), "cannot be written"),
    case("machine/cache-disk", FAIL, on(disk_value=Disk(1 << 20, "ext4", True)), "256.0 MiB are needed"),
    case("machine/cache-disk", FAIL, on(disk_value=OSError(5, "Input/output error")), "Input/output"),
    case("machine/cache-disk", WARN, on(disk_value=Disk(50 * GIB, "nfs4", True)), "local disk"),
    case("machine/open-files", PASS, subject, "65536 for 1024"),
    case("machine/open-files", PASS, on(files_limit=-1), "no limit"),
    case("machine/open-files", WARN, on(files_limit=1024), "ulimit -n"),
    case("machine/gpu-driver", NONE, subject, "no NVIDIA GPU"),
    case("machine/gpu-driver", PASS, on(files=DRIVER, programs={"nvidia-smi": "H200, 580\n"}), "H200, 580"),
    case("machine/gpu-driver", FAIL, on(files=DRIVER), "nvidia-smi fails"),
    case("machine/cuda", NONE, subject),
    case("machine/cuda", NONE, partial(subject, settings=settings(device="cpu")), "choose the CPU"),
    case("machine/cuda", PASS, kernels(GPU), "CUDA 13.0, 1 GPU"),
    case("machine/cuda", FAIL, on(files=DRIVER), "built for CPUs"),
    case("machine/gpus", NONE, subject),
    case("machine/gpus", PASS, kernels(GPU)),
    case("machine/gpus", WARN, kernels(replace(GPU, gpus=4)), "4 GPUs"),
    case("model/checkpoint", PASS, subject, "Qwen3-VL, 138 tensors"),
    case("model/checkpoint", FAIL, checkpoint(errors=("weights: a file is cut", "b")), "is cut, and 1 more"),
    case("model/checkpoint", WARN, checkpoint(warnings=("prompt: no template",)), "no template"),
    case("model/checkpoint", NONE, live, "MODEL"),
    case("model/memory", PASS, subject, "weights 1.9 GiB"),
    case("model/memory", FAIL, on(free=GIB), "the weights alone"),
    case("model/memory", FAIL, setting(kv_cache_mib=20_000), "weights and KV do not fit"),
    case("model/memory", WARN, setting(embed_cache_mib=12_000), "filled as they are used"),
    case("model/memory", PASS, setting(quantization="int4"), "weights 572"),
    case("model/memory", NONE, checkpoint(figures={}), "not known"),
    case("model/memory", NONE, kernels(GPU), "free memory of the GPU"),
    case("model/memory", PASS, gpu_with(80_000), "weights 1.9 GiB; 78.1 GiB free on the GPU"),
    case("model/memory", WARN, gpu_with(2_000), "little is left"),
    case("model/memory", FAIL, gpu_with(1_000), "do not fit"),
    case("model/memory", PASS, partial(gpu_with(999), settings=INT4), "weights 572"),
    case("model/revision", PASS, subject, "a folder does not change by itself"),
    case("model/revision", WARN, checkpoint(is_folder=False), "--revision"),
    case(
        "model/revision", PASS,
        partial(checkpoint(is_folder=False), settings=settings(revision="abc")), "abc",
    ),
    case("engine/ready", PASS, subject, "after 1.5 s"),
    case("engine/ready", PASS, partial(live, FakeWeb(routes={"/ready": Answer(404)})), "status 200"),
    case("engine/ready", PASS, partial(live, FakeWeb(routes=NO_HEALTH)), "status 200"),
    case("engine/ready", FAIL, partial(live, FakeWeb(routes=NOTHING)), "status 404"),
    case("engine/ready", FAIL, answering(routes={"/ready": error(503, "loading", {})}), "loading"),
    case("engine/precision", PASS, subject, "bfloat16"),
    case("engine/precision", WARN, answering(card=FLOAT32), "--dtype bfloat16, if"),
    case(
        "engine/precision", WARN, partial(answering(card=FLOAT32), settings=settings(dtype="float32")),
        "--dtype auto",
    ),
    case("engine/kernels", NONE, answering(card=FLOAT32), "see engine/precision"),
    case(
        "model/memory", PASS, checkpoint(figures={**CHECKPOINT.figures, "dtype": "float32"}),
        "weights 3.7 GiB",
    ),
    case("engine/precision", WARN, answering(card={**CARD, "quantization": "int4"}), "fovea eval "),
    case("engine/precision", NONE, answering(card={"id": "other"}), "does not tell"),
    case("engine/kernels", PASS, subject, "native"),
    case("engine/kernels", WARN, setting(kernels="torch"), "--kernels auto"),
    case("engine/kernels", PASS, logging("NativeKernels avx512"), "NativeKernels avx512 on cpu"),
    case("engine/kernels", WARN, logging("TorchKernels"), "TorchKernels on cpu"),
    case("engine/kernels", NONE, kernels(replace(KERNELS, failure="no compiler"))),
    case("engine/cuda-graphs", NONE, subject),
    case("engine/cuda-graphs", PASS, kernels(GPU)),
    case("engine/cuda-graphs", WARN, kernels(GPU, settings=settings(decode_graphs="off")), "auto"),
    case("engine/built-engines", PASS, setting(encoder_engines="auto"), "2 of 2 grids"),
    case("engine/built-engines", WARN, subject, "--encoder-engines auto"),
    case("engine/built-engines", NONE, partial(subject, built=lambda: replace(BUILT, exists=False))),
    case(
        "engine/built-engines", FAIL,
        partial(setting(encoder_engines="auto"), built=lambda: replace(BUILT, exists=False)), "fovea build",
    ),
    case(
        "engine/built-engines", FAIL,
        partial(setting(encoder_engines="auto"), built=lambda: replace(BUILT, problems=("part is changed",))),
        "part is changed",
    ),
    case(
        "engine/built-engines", FAIL,
        partial(
            subject, FakeWeb(metrics={**METRICS, "fovea:encoder_engines": 0}),
            settings=settings(encoder_engines="auto"),
        ),
        "0 of 2 grids",
    ),
    case("engine/memory", NONE, subject, "only the memory of a GPU"),
    case("engine/memory", NONE, answering(card={**CARD, "owned_by": "vllm"})),
    case("engine/memory", PASS, answering(metrics=ON_GPU), "step 2.0 GiB, 1.0 GiB unused"),
    case(
        "engine/memory", WARN, answering(metrics={**ON_GPU, "fovea:memory_spare_bytes": -GIB}),
        "1.0 GiB are missing",
    ),
    case(
        "engine/memory", WARN, answering(metrics={**ON_GPU, "fovea:memory_retries_total": 3}),
        "3 steps and 0 images did not fit",
    ),
    case(
        "engine/memory", FAIL, answering(metrics={**ON_GPU, "fovea:memory_failures_total": 1}),
        "1 request did not fit even alone",
    ),
    case("engine/failures", PASS, subject),
    case("engine/failures", FAIL, answering(metrics={**METRICS, "fovea:failed_steps_total": 3}), "3 failed"),
    case("engine/failures", NONE, answering(card={**CARD, "owned_by": "vllm"})),
]  # fmt: skip
