"""Fovea from this source tree, run by the interpreter that runs the comparison."""

from __future__ import annotations

import sys
from pathlib import Path

from fovea import __version__
from servers.base import TORCH_AVX2, Engine, Home, Start, keep_to_avx2

KV_MIB, EMBED_MIB = 512, 256
QUANTIZATION = {"bf16": "none", "int8": "int8", "int4": "int4"}


def install(home: Home) -> None:
    home.folder.mkdir(parents=True, exist_ok=True)


def start(home: Home, model: Path, precision: str, port: int) -> Start:
    command = (
        str(Path(sys.executable).with_name("fovea")), "serve", str(model), "--port", str(port),
        "--log-level", "warning", "--threads", str(home.threads), "--dtype", "bfloat16",
        "--kv-cache-mib", str(KV_MIB),
        "--embed-cache-mib", str(EMBED_MIB), "--quantization", QUANTIZATION[precision],
    )  # fmt: skip
    return Start(command, pools_mib=KV_MIB + EMBED_MIB)


ENGINE = Engine(
    title="Fovea",
    precisions={"bf16": "bf16", "int8": "int8", "int4": "int4, encoder and head int8"},
    recipe="this tree",
    install=install,
    convert=lambda home, checkpoint, precision: checkpoint,
    start=start,
    versions=lambda home: {"fovea": __version__},
)
AVX2 = keep_to_avx2(ENGINE, {"FOVEA_NATIVE_KERNELS": "avx2", **TORCH_AVX2})
