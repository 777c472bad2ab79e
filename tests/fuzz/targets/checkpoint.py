"""The folder of a checkpoint: damaged JSON files and safetensors headers give an error of Fovea.

The first byte of an input chooses the file, the rest is its content. The other files are valid.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import struct
import tempfile
import warnings
from functools import cache
from pathlib import Path

from fovea.core.names import bundled_model
from fovea.engine.load import read_config
from fovea.engine.models.look_heads import read_heads
from fovea.engine.models.side_files import build_processors, default_sampling
from fovea.engine.models.stored import common_dtype, read_header, shard_files
from tests.fuzz.refusals import note, refusals

LONGEST = 8192
FILES = (
    "config.json", "model.safetensors.index.json", "model.safetensors", "preprocessor_config.json",
    "generation_config.json", "video_preprocessor_config.json", "fovea/look.json",
)  # fmt: skip
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")
WORDS = (
    b'"model_type"', b'"qwen3_vl"', b'"llava"', b'"idefics3"', b'"text_config"', b'"vision_config"',
    b'"weight_map"', b'"dtype"', b'"F32"', b'"BF16"', b'"shape"', b'"data_offsets"', b'"__metadata__"',
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"[]", b"{}", b'""', b'"../../etc/passwd"',
    b'"/etc/passwd"', b"[" * 50, b"99999999999999999999", b"\\u0000", b"\xff", b'"patch_size"',
    b'"image_mean"', b'"heads"', b"[[3, 2]]", b'"rope_scaling"', b'"hidden_size"',
    b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\0" * 8,
)  # fmt: skip


@cache
def _folder() -> Path:
    """A copy of the bundled model without its weights, and with a file of one tensor instead."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(prefix="fovea-fuzz-"))
    for path in bundled_model().glob("*.json"):
        shutil.copy(path, folder)
    (folder / "model.safetensors").write_bytes(_tensors())
    (folder / "fovea").mkdir()
    return folder


def target(data: bytes) -> None:
    if not data:
        return
    folder, name = _folder(), FILES[data[0] % len(FILES)]
    path = folder / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data[1:])
    try:
        read = _read_heads if name == FILES[6] else _read_weights if name in WEIGHTS else _read_settings
        read(folder)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def _read_weights(folder: Path) -> None:
    with refusals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        files = shard_files(folder)
        for file in files:
            assert file.resolve().is_relative_to(folder.resolve()), f"{file} is outside of the folder"
            with file.open("rb") as opened:
                entries, _ = read_header(opened, file)
                note(f"{len(entries)} tensors")
                common_dtype(entries)


def _read_heads(folder: Path) -> None:
    with refusals():
        heads = read_heads(folder, [(3, 2), (3, 3)])
        assert heads
        note(f"{len(heads)} heads")


def _read_settings(folder: Path) -> None:
    with refusals():
        note(f"{len(default_sampling(folder))} defaults")
    with refusals(), warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        config = read_config(folder)
        note(str(config.model_type))
        build_processors(folder, config)


def _tensors(header: bytes | None = None, length: int | None = None) -> bytes:
    entry = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    head = json.dumps(entry).encode() if header is None else header
    return struct.pack("<Q", len(head) if length is None else length) + head + bytes(8)


def seeds() -> list[bytes]:
    contents: dict[int, list[bytes]] = {
        0: [
            (bundled_model() / "config.json").read_bytes(),
            b"{}",
            b"[]",
            b"",
            b"\xff",
            b'{"model_type": 5}',
            b"[" * 4000,
            b'{"model_type": "qwen3_vl"}',
            b'{"model_type": "llava", "vision_config": 5}',
        ],
        1: [
            b'{"weight_map": {"a": "model.safetensors"}}',
            b'{"weight_map": {"a": "../../../etc/hostname"}}',
            b'{"weight_map": []}',
            b'{"weight_map": {"a": 5}}',
            b'{"weight_map": {"a": "/etc/hostname"}}',
            b'{"weight_map": {}}',
            b'{"weight_map": {"a": "config.json"}}',
            b'{"weight_map": {"a": "x\\u0000"}}',
            b"[" * 4000,
        ],
        2: [
            _tensors(),
            _tensors(length=1 << 62),
            _tensors(length=0),
            _tensors(b"[]"),
            _tensors(b'{"a": 5}'),
            b"",
            b"\0" * 7,
            _tensors(b'{"a": {"dtype": "F32", "shape": [9223372036854775807, 4], "data_offsets": [0, 8]}}'),
            _tensors(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}'),
            _tensors(b"[" * 4000),
            _tensors(
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
                b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
            ),
        ],
        3: [
            (bundled_model() / "preprocessor_config.json").read_bytes(),
            b"{}",
            b'{"patch_size": 0}',
            b'{"size": 5}',
        ],
        4: [
            b"{}",
            b'{"do_sample": true, "temperature": 1e999}',
            b'{"do_sample": 1, "top_k": -5}',
            b'{"eos_token_id": [[]]}',
        ],
        5: [b"{}", b'{"fps": 0}', b'{"min_frames": -1, "max_frames": null}', b"[]"],
        6: [
            (bundled_model() / "fovea" / "look.json").read_bytes(),
            b"{}",
            b"[]",
            b'{"heads": [[3, 2], [3, 2]]}',
            b'{"heads": [[-1, true]]}',
            b'{"heads": [[3, 1e999]]}',
            b'{"heads": [[[' + b"[" * 4000,
        ],
    }
    return [bytes([number]) + content for number, inputs in contents.items() for content in inputs]
