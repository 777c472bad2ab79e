"""Headers of GGUF files: good ones are read as the package gguf reads them, bad ones are refused by name."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from fovea.core.errors import CheckpointError
from fovea.engine.models.gguf import reader
from fovea.engine.models.gguf.reader import GgufFile, open_split
from tests.fuzz.targets.gguf import F32, Q8_0, file_of, model, tensor_of, text, value_of


def read(folder: Path, content: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_a_file_of_the_package_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(64)
    written: dict[str, Any] = {
        "a.u8": 255, "a.i64": -(1 << 40), "a.f32": 0.5, "a.f64": 0.1, "a.bool": True, "a.text": "\u00e9 \n",
    }  # fmt: skip
    for name, add in (
        ("a.u8", writer.add_uint8), ("a.i64", writer.add_int64), ("a.f32", writer.add_float32),
        ("a.f64", writer.add_float64), ("a.bool", writer.add_bool), ("a.text", writer.add_string),
    ):  # fmt: skip
        add(name, written[name])
    writer.add_array("a.texts", ["one", "two \n", ""])
    writer.add_array("a.numbers", [3, -1, 5])
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("first", first)
    writer.add_tensor("second", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    assert {name: file.metadata[name] for name in written} == written
    assert file.metadata["a.texts"] == ["one", "two \n", ""]
    assert file.metadata["a.numbers"].tolist() == [3, -1, 5]
    shapes = {tensor.name: (tensor.type.name, tensor.shape) for tensor in file.tensors}
    assert shapes == {"first": ("F32", (3, 4)), "second": ("F16", (5,))}
    place = file.by_name["first"].start
    assert place % 64 == 0
    content = file.path.read_bytes()
    assert np.array_equal(np.frombuffer(content[place : place + 48], np.float32).reshape(3, 4), first)


def test_long_vocabularies_cross_the_windows_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "READ_AT_ONCE", 37)
    words = [f"word {number} " * (number % 9) for number in range(500)]
    file = read(tmp_path, file_of({"a": ("[str]", words), "b": ("u8", 7)}))
    assert file.metadata == {"a": words, "b": 7}


HUGE = (1 << 63) - 1
HEAD = b"GGUF" + struct.pack("<I", 3)
ONE = struct.pack("<QQ", 0, 1)
REFUSED = {
    "another file": (b"PK\3\4" + bytes(40), "is not a GGUF file"),
    "empty": (b"", "is not a GGUF file"),
    "version 1": (file_of({}, version=1), "has version 1 of the format; accepted: 2 and 3"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian byte order"),
    "tensor count": (HEAD + struct.pack("<QQ", HUGE, 0), f"{HUGE} tensors would take"),
    "entry count": (HEAD + struct.pack("<QQ", 0, HUGE), f"{HUGE} metadata entries would take"),
    "name length": (
        HEAD + ONE + struct.pack("<Q", HUGE) + bytes(8),
        "the name of metadata entry 0 has",
    ),
    "text length": (HEAD + ONE + text("a") + struct.pack("<IQ", 8, HUGE), "a has 9223372036854775807 bytes"),
    "array length": (
        HEAD + ONE + text("a") + struct.pack("<IIQ", 9, 10, HUGE), "the 9223372036854775807 values of a"
    ),
    "texts": (HEAD + ONE + text("a") + struct.pack("<IIQ", 9, 8, HUGE), f"the {HUGE} texts of a"),
    "nested": (HEAD + ONE + text("a") + struct.pack("<IIQ", 9, 9, 1), "a is an array of arrays"),
    "type of a value": (HEAD + ONE + text("a") + struct.pack("<IQ", 13, 0), "a has type 13; accepted: types"),
    "boolean": (HEAD + ONE + text("a") + struct.pack("<IB", 7, 2), "a is a boolean of value 2"),
    "not Unicode": (HEAD + ONE + text(b"\xff\xfe") + value_of("u8", 1), "is not UTF-8 text"),
    "same name": (
        HEAD + struct.pack("<QQ", 0, 2) + 2 * (text("a") + value_of("u8", 1)), "the metadata entry 'a' twice"
    ),
    "alignment": (file_of({"general.alignment": ("u32", 48)}), "general.alignment is 48; accepted: a power"),
    "alignment 0": (file_of({"general.alignment": ("u32", 0)}), "general.alignment is 0"),
    "alignment as text": (file_of({"general.alignment": ("str", "x")}), "general.alignment is x"),
}  # fmt: skip
TABLES = {
    "no dimension": (tensor_of("t", (), F32, 0), "tensor 't' has 0 dimensions; accepted: 1 to 4"),
    "dimensions": (tensor_of("t", (1,) * 5, F32, 0), "tensor 't' has 5 dimensions"),
    "size 0": (tensor_of("t", (0, 4), F32, 0), r"has shape \[0, 4\]"),
    "large": (tensor_of("t", (1 << 62, 1 << 62), F32, 0), "is larger than the file"),
    "rows of part of a block": (tensor_of("t", (33, 2), Q8_0, 0), r"accepted for Q8_0: .* a multiple of 32"),
    "vector of blocks": (tensor_of("t", (32,), Q8_0, 0), "has type Q8_0 and one dimension; accepted: floats"),
    "type": (tensor_of("t", (32, 2), 16, 0), "tensor 't' has type IQ2_XXS; accepted: F32, F16, Q4_0"),
    "unknown type": (tensor_of("t", (32, 2), 200, 0), "has type of number 200; accepted: F32"),
    "offset": (tensor_of("t", (2,), F32, 3), "has offset 3; accepted: multiples of 32"),
    "offset beyond the end": (tensor_of("t", (2,), F32, 1 << 40), "has offset 1099511627776"),
    "end beyond the end": (tensor_of("t", (16,), F32, 32), "is truncated: tensor 't' ends at byte"),
    "name": (tensor_of("t" * 300, (2,), F32, 0), "the name of tensor 0 has 300 bytes"),
}


@pytest.mark.parametrize("case", [*REFUSED, *TABLES])
def test_a_wrong_header_is_refused_by_name(case: str, tmp_path: Path) -> None:
    if case in REFUSED:
        content, message = REFUSED[case]
    else:
        table, message = TABLES[case]
        content = file_of({}, [("t", (1,), F32)], table=table, data=bytes(64))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, content)
    assert caught.value.message.startswith(str(tmp_path / "model.gguf"))


def test_overlapping_and_repeated_tensors_are_refused(tmp_path: Path) -> None:
    for names, message in (("ab", "begins within another one"), ("aa", "the tensor 'a' twice")):
        table = b"".join(tensor_of(name, (16,), F32, 0) for name in names)
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, file_of({}, [("x", (1,), F32)] * 2, table=table, data=bytes(64)))


def test_much_metadata_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_METADATA", 1000)
    with pytest.raises(CheckpointError, match="has too much metadata: the 2000 values of a"):
        read(tmp_path, file_of({"a": ("[u8]", bytes(2000))}))
    monkeypatch.setattr(reader, "MOST_STRINGS", 5)
    with pytest.raises(CheckpointError, match="has more than 5 texts in its arrays"):
        read(tmp_path, file_of({"a": ("[str]", ["x"] * 3), "b": ("[str]", ["x"] * 3)}))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """Padding at the end is the only part that may be missing."""
    whole = model()
    file = read(tmp_path, whole)
    end = max(tensor.start + tensor.nbytes for tensor in file.tensors)
    cuts = {*range(0, file.tensors[0].start, 7), *range(file.tensors[0].start, end, 101), end - 1}
    for cut in sorted(cuts):
        with pytest.raises(CheckpointError):
            read(tmp_path, whole[:cut])
    assert read(tmp_path, whole[:end]).tensors == file.tensors


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    whole, chance = model(), random.Random(5)
    begin = read(tmp_path, whole).tensors[0].start
    outcomes = set()
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            content[chance.randrange(begin)] = chance.randrange(256)
        try:
            file = read(tmp_path, bytes(content))
            assert all(tensor.start + tensor.nbytes <= len(content) for tensor in file.tensors)
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_parts_of_a_split_model_are_found(tmp_path: Path) -> None:
    for number in range(3):
        entries = {"split.no": ("u16", number), "split.count": ("u16", 3)}
        content = file_of(entries, [(f"t{number}", (8,), F32)])
        (tmp_path / f"m-{number + 1:05}-of-00003.gguf").write_bytes(content)
    files = open_split(tmp_path / "m-00002-of-00003.gguf")
    assert [file.tensors[0].name for file in files] == ["t0", "t1", "t2"]
    third = tmp_path / "m-00003-of-00003.gguf"
    third.write_bytes((tmp_path / "m-00001-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"split.no and split.count are \(0, 3\); accepted .* \(2, 3\)"):
        open_split(tmp_path / "m-00001-of-00003.gguf")
    third.unlink()
    with pytest.raises(CheckpointError, match=r"1 of 3 files are missing: \['m-00003-of-00003.gguf'\]"):
        open_split(tmp_path / "m-00001-of-00003.gguf")
    renamed = tmp_path / "m.gguf"
    renamed.write_bytes((tmp_path / "m-00001-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"split.count are \(0, 3\)"):
        open_split(renamed)
