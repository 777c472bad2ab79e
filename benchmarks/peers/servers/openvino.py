"""OpenVINO GenAI, exported by optimum-intel; inside/serve_openvino.py serves its continuous batching."""

from __future__ import annotations

import shutil
from pathlib import Path

from servers.base import INSIDE, Engine, Home, Start

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


ENGINE = Engine(
    title="OpenVINO GenAI",
    precisions={"bf16": "fp16 weights, bf16 products", "int8": "int8 weights", "int4": "int4 weights"},
    recipe=" ".join(REQUIREMENTS),
    install=install,
    convert=convert,
    start=start,
    versions=lambda home: {name: home.version(name) for name in ("openvino-genai", "optimum-intel")},
)
