"""OpenVINO GenAI, exported by optimum-intel; inside/serve_openvino.py serves its continuous batching."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from servers.base import INSIDE, Engine, Home, Start, keep_to_avx2

REQUIREMENTS = (
    "openvino-genai==2026.4.1.0",
    "optimum-intel[openvino]==2.2.0",
    "transformers==5.0.0",
    "jinja2",
)
"""transformers 5.0, because optimum-intel accepts newer versions but then cannot export this model."""
WEIGHTS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
KV_GB = 1


def install(home: Home) -> None:
    home.venv(*REQUIREMENTS)
    shutil.copy(INSIDE / "cpu_torchvision.py", home.packages / "sitecustomize.py")


def convert(home: Home, checkpoint: Path, precision: str) -> Path:
    folder = home.models(checkpoint) / precision
    if not (folder / "openvino_detokenizer.xml").exists():  # the export writes it last
        shutil.rmtree(folder, ignore_errors=True)
        home.run(str(home.bin / "optimum-cli"), "export", "openvino", "--model", str(checkpoint),
                 "--task", "image-text-to-text", "--weight-format", WEIGHTS[precision],
                 str(folder))  # fmt: skip
    return folder


def start(home: Home, model: Path, precision: str, port: int) -> Start:
    server = INSIDE / "serve_openvino.py"
    command = (str(home.python), str(server), str(model), "--port", str(port), "--threads", str(home.threads))
    return Start((*command, "--kv-gb", str(KV_GB)), pools_mib=KV_GB * 1024)


def start_avx2(home: Home, model: Path, precision: str, port: int) -> Start:
    """Start it with a library in front that answers for OpenVINO which instructions the CPU has.

    OpenVINO's own kernels, such as that of attention, ask `ov::with_cpu_x86_avx512f` and the like; there is
    no switch for them. With ONEDNN_MAX_CPU_ISA alone it does not start, because its parts disagree.
    """
    library = home.folder / "openvino_avx2.so"
    home.run("c++", "-shared", "-fPIC", "-o", str(library), str(INSIDE / "openvino_avx2.cpp"))
    plain = start(home, model, precision, port)
    return replace(plain, env={**plain.env, "LD_PRELOAD": str(library)})


ENGINE = Engine(
    title="OpenVINO GenAI",
    precisions={"bf16": "fp16 weights, bf16 products", "int8": "int8 weights", "int4": "int4 weights"},
    recipe=" ".join(REQUIREMENTS),
    install=install,
    convert=convert,
    start=start,
    versions=lambda home: {name: home.version(name) for name in ("openvino-genai", "optimum-intel")},
)
AVX2 = keep_to_avx2(
    replace(
        ENGINE, start=start_avx2, precisions={**ENGINE.precisions, "bf16": "fp16 weights, float32 products"}
    ),
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "a preloaded library in which `ov::with_cpu_x86_avx512*` answer no",
)  # fmt: skip
