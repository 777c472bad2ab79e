"""transformers' `generate`, served by inside/serve_transformers.py."""

from __future__ import annotations

from pathlib import Path

from servers.base import INSIDE, Engine, Home, Start

REQUIREMENTS = ("transformers==5.23.0", "pillow", "jinja2")


def start(home: Home, model: Path, precision: str, port: int) -> Start:
    server = INSIDE / "serve_transformers.py"
    command = (str(home.python), str(server), str(model), "--port", str(port), "--threads", str(home.threads))
    return Start(command)


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
