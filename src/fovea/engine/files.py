"""Reads the files of a checkpoint. Anybody may have made them, so links, sizes and numbers are checked.

A model is built from the numbers in config.json before any weight is read. Without bounds, a billion layers
would be built one by one, and a wrong type would end in a bare TypeError.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError

MIB = 1 << 20
MOST_BYTES = {".json": 32 * MIB, ".jinja": MIB, ".txt": 64 * MIB, ".model": 64 * MIB}
"""Largest files by suffix, in bytes. Weights have no limit of their own."""
MOST_TOKENIZER_BYTES = 128 * MIB
"""Largest tokenizer.json, in bytes."""
VOCABULARIES = ("tokenizer.json", "vocab.json")
"""Large files that only libraries read, whose parsers have a limit of their own for nesting."""
MOST_DEPTH = 64
"""Most lists and objects inside each other in a JSON file."""
WEIGHTS = ".safetensors"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ALIKE = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def check_folder(folder: Path) -> None:
    """Check all files of a checkpoint's folder that are read: kind, links, size, nesting.

    A link must lead into the folder, or into `blobs` of a download by huggingface_hub.
    Raises CheckpointError, naming the file.
    """
    for _, error in folder_problems(folder):
        raise error


def folder_problems(folder: Path) -> Iterator[tuple[Path, CheckpointError]]:
    """Yield each file of a checkpoint's folder that must not be read, and the reason. See `check_folder`.

    Raises CheckpointError if the folder itself cannot be read.
    """
    root = folder.resolve()
    try:
        files = [path for path in folder.glob("*") if path.suffix in MOST_BYTES or path.suffix == WEIGHTS]
        files += [path for path in folder.glob("*/*.safetensors") if path.parent.name == "fovea"]
        files += folder.glob("additional_chat_templates/*.jinja")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    for path in sorted(files):
        try:
            check_file(path, root)
        except CheckpointError as error:
            yield path, error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dictionary if the file does not exist.

    Raises CheckpointError if the file is too large, nested too deeply, not JSON, or holds another type.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(_json_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def read_text(path: Path) -> str:
    """Return the text of a file. Raises CheckpointError if it is too large, or not UTF-8."""
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error.reason}") from error


def named_file(folder: Path, name: object, where: Path) -> Path:
    """Return the file of a checkpoint that another file names.

    where: the file that names it, for the error.
    Raises CheckpointError unless the name is that of a weight file in the same folder.
    """
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(WEIGHTS) or "\0" in name:
        raise CheckpointError(
            f"{where} is not a weight index: it names {str(name)[:200]!r}; "
            f"accepted: names of *{WEIGHTS} files in the same folder"
        )
    return folder / name


def is_too_deep(content: bytes) -> bool:
    """Whether more than MOST_DEPTH lists and objects of a JSON text are inside each other.

    The text need not be valid JSON; brackets without a partner do not count.
    """
    brackets = _STRING.sub(b"", content).translate(_ALIKE, _OTHERS)
    for _ in range(MOST_DEPTH):
        inner = len(brackets)
        brackets = brackets.replace(b"[]", b"")  # the innermost ones
        if len(brackets) == inner:
            return False
    return b"[]" in brackets


def check_file(path: Path, root: Path) -> None:
    """Check one file of a checkpoint. root: the folder, without links. Raises CheckpointError."""
    try:
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "its links form a loop"
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    if not target.is_relative_to(root) and not _is_hub_blob(target):
        raise CheckpointError(
            f"{path} is a link to {target}, outside of the checkpoint; "
            "accepted: files of the folder, and links into the blobs folder of a hub download"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if path.suffix == ".json" and path.name not in VOCABULARIES:
        _json_bytes(path)
    elif path.suffix in MOST_BYTES:
        _check_size(path, status.st_size)


def _is_hub_blob(target: Path) -> bool:
    """Whether a path is of the layout .../models--OWNER--NAME/blobs/HASH."""
    return target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")


def _json_bytes(path: Path) -> bytes:
    content = _read(path)
    if is_too_deep(content):
        raise CheckpointError(
            f"{path} has too many lists and objects inside each other; accepted: at most {MOST_DEPTH}"
        )
    return content


def _read(path: Path) -> bytes:
    try:
        _check_size(path, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _check_size(path: Path, size: int) -> None:
    most = MOST_TOKENIZER_BYTES if path.name == "tokenizer.json" else MOST_BYTES.get(path.suffix, MIB)
    if size > most:
        raise CheckpointError(f"{path} has {size} bytes; accepted: at most {most}")


BOUNDS: Mapping[str, int] = {
    "num_hidden_layers": 1024,
    "depth": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_heads": 4096,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 17,
    "embed_dim": 1 << 17,
    "out_hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "mlp_dim": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "n_routed_experts": 1 << 16,
    "output_channels": 1 << 17,
    "downsample_channels": 1 << 17,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "num_position_embeddings": 1 << 24,
    "image_size": 1 << 16,
    "patch_size": 1 << 12,
    "spatial_merge_size": 64,
    "temporal_patch_size": 64,
    "window_size": 1 << 16,
    "num_channels": 64,
    "in_channels": 64,
    "scale_factor": 64,
}
"""Largest value of each field, in config.json and all of its sections; the smallest is 1."""
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields with the id of a token."""


def check_bounds(config: Mapping[str, Any], path: Path) -> None:
    """Check the numbers of a configuration and of its sections.

    path: the file, for errors.
    Raises CheckpointError, naming the field and the accepted range.
    """
    waiting = [("", config)]
    while waiting:
        prefix, section = waiting.pop()
        for name, value in section.items():
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{name}.", value))
            elif name in BOUNDS and value is not None:
                _check(path, prefix + name, value, 1, BOUNDS[name])
            elif name in TOKENS and value is not None:
                _check(path, prefix + name, value, 0, BOUNDS["vocab_size"])
        _check_heads(path, prefix, section)


def _check_heads(path: Path, prefix: str, section: Mapping[str, Any]) -> None:
    """Check that a width is a multiple of the heads, and the heads one of the key-value heads.

    Raises CheckpointError.
    """
    heads = next((name for name in ("num_heads", "num_attention_heads") if section.get(name)), "")
    pairs = [(heads, "num_key_value_heads")]
    if not section.get("head_dim"):
        pairs.append(("embed_dim" if section.get("embed_dim") else "hidden_size", heads))
    for whole, part in pairs:
        left, right = section.get(whole), section.get(part)
        if isinstance(left, int) and isinstance(right, int) and left % right:
            raise CheckpointError(
                f"{path}: {prefix}{whole} is {left}; accepted: a multiple of {prefix}{part} ({right})",
                param=prefix + whole,
            )


def _check(path: Path, name: str, value: Any, low: int, high: int) -> None:
    values = value if isinstance(value, list) and value else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values):
        raise CheckpointError(
            f"{path}: {name} is {str(value)[:100]}; accepted: integers from {low} to {high}", param=name
        )
