"""Names: of the distribution for pip and its extras, the bundled model, models in general, a header, sockets.

One model has many names (of a hub, a folder, another server); `canonical` and `spellings` compare them.
"""

from __future__ import annotations

import re
from pathlib import Path

DISTRIBUTION = "fovea-vlm"
"""Name for pip. The name `fovea` belongs to another project on PyPI."""
KEY_HEADER = "x-fovea-key"
"""Header by which what is behind a gateway can send an image to the same engine each time."""
BUNDLED = "fovea-tiny"
"""Name of the bundled model, which is found without a folder and without a hub."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


_SOCKET = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})|ipc://\S+")


def is_socket_address(text: str) -> bool:
    """Whether a text is an address of a ZMQ socket: tcp://HOST:PORT, also with * as HOST, or ipc://PATH."""
    found = _SOCKET.fullmatch(text)
    return found is not None and (found[2] is None or 0 < int(found[2]) < 65536)


def bundled_model() -> Path:
    """Return the folder of the bundled model."""
    return Path(__file__).resolve().parent.parent / "assets" / BUNDLED


def served_name(name: str) -> str:
    """Return the name for clients: a folder's last part; a hub id and the bundled model as they are.

    Of a GGUF file it is the file's name without its ending, and without the number of a part.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.resolve().name if name != BUNDLED and path.is_dir() else name


_LONGEST = 255
"""Most characters of a name; a longer name cannot be a model's."""
_CACHE_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")
"""Folder of a download by huggingface_hub, .../models--OWNER--NAME/snapshots/COMMIT."""
_SEPARATORS = re.compile(r"[\s._-]+")
_DECORATION = re.compile(
    r"-(?:awq|gptq|gguf|ggml|bnb|hqq|eetq|exl[23]|mlx|autoround|auto-round|torchao|marlin|qat|ud|unsloth"
    r"|quantized|dynamic|static|block|fp8|fp16|bf16|f16|nf4|fp4|nvfp4(?:a16)?|mxfp[48]|int[48]|[2-8]bit"
    r"|w[48]a(?:16|[48])|g\d{2,3}|i?q[2-8](?:-(?:k|[01]))?(?:-(?:xxs|xs|s|m|l|xl|nl))?)$"
)
"""One ending of a name that tells how weights are stored, and nothing about images."""


def canonical(name: str) -> str:
    """Return the part of a model's name that says which model it is, in one spelling.

    "RedHatAI/Qwen2.5-VL-7B-Instruct-FP8-dynamic:free" becomes "qwen2-5-vl-7b-instruct". The owner, a tag
    after ":" and the way in which weights are stored are left out, because a copy of a model under another
    owner has the same name. Words that can mean another model ("chat", "thinking", sizes) stay. Names of more
    than 255 characters become "".
    """
    found = _CACHE_FOLDER.search(name)
    last = found[2] if found else name.strip().rstrip("/").rpartition("/")[2]
    if len(last) > _LONGEST:
        return ""
    text = _SEPARATORS.sub("-", last.partition(":")[0].lower()).strip("-")
    while shorter := _DECORATION.search(text):
        text = text[: shorter.start()]
    return text


def spellings(model: str) -> tuple[str, ...]:
    """Return the canonical names of a known hub id: NAME, and OWNER-NAME, as some copies call it.

    A name without an owner, such as that of the bundled model, has only one.
    """
    owner, _, name = model.partition("/")
    if not name:
        return (canonical(model),)
    short = canonical(name)
    return short, f"{_SEPARATORS.sub('-', owner.lower())}-{short}"
