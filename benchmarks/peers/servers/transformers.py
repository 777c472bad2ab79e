"""transformers' `generate`, served by inside/serve_transformers.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from servers.base import INSIDE, TORCH_AVX2, Engine, Home, Start, keep_to_avx2

REQUIREMENTS = ("transformers==5.23.0", "pillow", "jinja2")


def start(home: Home, model: Path, precision: str, port: int, dtype: str = "bfloat16") -> Start:
    server = INSIDE / "serve_transformers.py"
    command = (str(home.python), str(server), str(model), "--port", str(port), "--threads", str(home.threads))
    return Start((*command, "--dtype", dtype))


ENGINE = Engine(
    title="transformers",
    precisions={"bf16": "bf16"},
    recipe=" ".join(REQUIREMENTS),
    install=lambda home: home.venv(*REQUIREMENTS),
    convert=lambda home, checkpoint, precision: checkpoint,
    start=start,
    versions=lambda home: {"transformers": home.version("transformers")},
    lacks={
        "stall": "a running batch accepts no further request, so the image waits until the stream has ended",
        "int8": "it has no int8 products on a CPU",
        "int4": "it has no int4 products on a CPU",
    },
)
AVX2 = keep_to_avx2(
    replace(
        ENGINE, precisions={"bf16": "float32, because bf16 is several times slower without AVX-512"},
        start=partial(start, dtype="float32"),
    ),
    TORCH_AVX2,
)  # fmt: skip
