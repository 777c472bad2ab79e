"""A GGUF file: damaged headers give an error of Fovea, and so do wrong configurations and tokenizers.

`file_of` writes files by the format's description, so that it can write wrong ones, too.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fovea.engine.models.gguf.checkpoint import find_gguf
from tests.fuzz.refusals import note, refusals

LONGEST = 1 << 14
WORDS = (
    b"GGUF", b"general.architecture", b"general.alignment", b"llama", b"gemma3", b"clip",
    b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count", b"split.count",
    b"llama.context_length",
    b"tokenizer.ggml.model", b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.scores",
    b"tokenizer.ggml.token_type", b"token_embd.weight", b"blk.0.attn_q.weight", b"rope_freqs.weight",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 8, b"\0" * 8, b"\x08\0\0\0", b"\x09\0\0\0", b"\x0c\0\0\0",
    b"\x20\0\0\0\0\0\0\0",
)  # fmt: skip
NUMBERS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "f64": 12,
}
"""Types of metadata by name."""
CODES = dict(zip(NUMBERS, "BbHhIif?Qd", strict=True))
Entry = tuple[str, Any]
"""Type and value. Of arrays the type is that of the values in brackets: "[i32]", "[str]"."""
TEXTS = {"general.architecture": ("str", "llama"), "tokenizer.ggml.model": ("str", "llama")}
SHAPE = {
    "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.feed_forward_length": 32, "llama.attention.head_count": 2,
}  # fmt: skip
TOKENS = ("<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a")
ENTRIES: Mapping[str, Entry] = {
    **TEXTS,
    **{name: ("u32", value) for name, value in SHAPE.items()},
    "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
    "tokenizer.ggml.tokens": ("[str]", TOKENS),
    "tokenizer.ggml.scores": ("[f32]", tuple(-float(n) for n in range(len(TOKENS)))),
    "tokenizer.ggml.token_type": ("[i32]", (2, 3, 3, 1, 1, 1, 1, 1)),
    "tokenizer.ggml.eos_token_id": ("u32", 2),
    "tokenizer.ggml.bos_token_id": ("u32", 1),
    "tokenizer.ggml.unknown_token_id": ("u32", 0),
}
Q8_0, F32 = 8, 0
SIZES = {F32: (1, 4), Q8_0: (32, 34)}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(kind: str, value: Any) -> bytes:
    """A value of the metadata, with its type before it."""
    if kind == "str":
        return struct.pack("<I", 8) + text(value)
    if kind == "[str]":
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if kind.startswith("["):
        inner = kind.strip("[]")
        return struct.pack("<IIQ", 9, NUMBERS[inner], len(value)) + struct.pack(
            f"<{len(value)}{CODES[inner]}", *value
        )
    return struct.pack("<I", NUMBERS[kind]) + struct.pack("<" + CODES[kind], value)


def tensor_of(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry of the table. shape: in the order of the file, the rows' values first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    entries: Mapping[str, Entry],
    tensors: Sequence[tuple[str, Sequence[int], int]] = (),
    *,
    version: int = 3,
    table: bytes | None = None,
    data: bytes | None = None,
) -> bytes:
    """A whole file. tensors: name, shape, type. table, data: replace the tensors' table and data."""
    head, places, at = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)), [], 0
    for name, shape, kind in tensors:
        places.append(tensor_of(name, shape, kind, at))
        size = 1
        for side in shape:
            size *= side
        values, nbytes = SIZES[kind]
        at += -(-(size // values * nbytes) // 32) * 32
    body = b"".join(text(name) + value_of(*entry) for name, entry in entries.items())
    whole = head + body + (b"".join(places) if table is None else table)
    whole += bytes(-len(whole) % 32)
    return whole + (bytes(at) if data is None else data)


def model(changes: Mapping[str, Entry | None] = {}, **other: Any) -> bytes:
    """A whole model of one layer. changes: entries that are added, replaced or (None) left out."""
    entries = {name: entry for name, entry in {**ENTRIES, **changes}.items() if entry is not None}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = [("token_embd.weight", (32, len(TOKENS)), Q8_0), ("output_norm.weight", (32,), F32)]
    tensors += [(f"blk.0.{name}.weight", (32, 32), Q8_0) for name in matrices]
    tensors += [(f"blk.0.{name}.weight", (32,), F32) for name in ("attn_norm", "ffn_norm")]
    return file_of(entries, tensors, **other)


@cache
def _path() -> Path:
    import tokenizers  # noqa: F401 - the first input should not be slower than the others
    import transformers

    assert transformers.CONFIG_MAPPING["llama"]
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    return Path(tempfile.mkdtemp(prefix="fovea-fuzz-")) / "model.gguf"


def target(data: bytes) -> None:
    path = _path()
    path.write_bytes(data)
    with refusals(), warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        checkpoint = find_gguf(path)
        assert checkpoint is not None
        config = checkpoint.config()
        note(str(config.model_type))
        weights = checkpoint.weights(config)
        for number, (_, entries) in enumerate(weights.files):
            for entry in entries:
                if entry.coded:
                    note(entry.coded)
                    assert weights.codes(number, entry).shape == entry.shape
        weights.close()
    if data[:4] == b"GGUF":
        with refusals(), contextlib.redirect_stderr(None):
            note(f"{len(find_gguf(path).tokenizer(config=_Config).encode('ab a'))} tokens")  # type: ignore[union-attr]


class _Config:
    """The only field of a configuration that a tokenizer without images needs."""

    model_type = "llama"


def seeds() -> list[bytes]:
    whole = model()
    return [
        whole,
        whole[:-1],
        b"",
        b"GGUF",
        file_of({}),
        file_of({}, version=2),
        file_of({}, version=1),
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 62, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 62),
        struct.pack(">4sIQQ", b"GGUF", 3, 0, 0),
        file_of({"general.alignment": ("u32", 0)}),
        file_of({"a": ("[u8]", range(9)), "b": ("[bool]", (True, False)), "c": ("f64", 1.0)}),
        model({"llama.block_count": ("u32", 0xFFFFFFFF)}),
        model({"llama.attention.head_count": ("[u32]", (2, 2))}),
        model({"tokenizer.ggml.pre": ("str", "gpt-2"), "tokenizer.ggml.model": ("str", "gpt2")}),
        model({"tokenizer.ggml.eos_token_id": ("u32", 99)}),
        model({"tokenizer.ggml.tokens": ("[str]", TOKENS[:-1] * 2)}),
    ]
