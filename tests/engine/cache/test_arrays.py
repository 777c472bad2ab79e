"""Tests of the file format: round trips, damage, and the safetensors package as another reader."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from fovea.engine.cache.disk_files import DTYPES, Array, Arrays, BadFile, decode, encode


def blob(key: str, arrays: Arrays) -> bytearray:
    return bytearray(b"".join(encode(key, arrays)))


@st.composite
def some_arrays(draw: st.DrawFn) -> Arrays:
    names = draw(
        st.lists(st.text(max_size=8).filter(lambda name: name != "__metadata__"), unique=True, max_size=4)
    )
    items = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        size = int(np.prod(shape)) * DTYPES[dtype][1]
        items.append(Array(name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return Arrays(tuple(items))


@given(key=st.text(max_size=20), arrays=some_arrays())
def test_round_trip_and_alignment(key: str, arrays: Arrays) -> None:
    file = blob(key, arrays)
    result = decode(file, key)
    assert result == arrays
    start = np.frombuffer(file, np.uint8).ctypes.data
    for array in result.items:
        if array.nbytes:
            assert (np.frombuffer(array.data, np.uint8).ctypes.data - start) % array.itemsize == 0


@given(arrays=some_arrays(), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_detected(arrays: Arrays, where: float, flip: int) -> None:
    file = blob("key", arrays)
    file[int(where * len(file))] ^= flip
    with pytest.raises(BadFile):
        decode(file, "key")


@given(arrays=some_arrays(), where=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(arrays: Arrays, where: float) -> None:
    file = blob("key", arrays)
    with pytest.raises(BadFile):
        decode(file[: int(where * len(file))], "key")
    with pytest.raises(BadFile, match="checksum"):
        decode(file + b"\0", "key")


@given(noise=st.binary(max_size=400))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(BadFile):
        decode(bytearray(noise), "key")


def test_another_key_and_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = blob("one", value())
    with pytest.raises(BadFile, match="another key"):
        decode(file, "two")
    monkeypatch.setattr("fovea.engine.cache.disk_files.VERSION", "9")
    with pytest.raises(BadFile, match="version is '1', not '9'"):
        decode(file, "one")


def test_an_invalid_header_with_a_valid_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = json.dumps

    def dump_wrong_offsets(header: dict[str, dict[str, object]], **options: object) -> str:
        header["embeds"]["data_offsets"] = [0, 999]
        return real(header, separators=(",", ":"))

    monkeypatch.setattr("fovea.engine.cache.disk_files.json.dumps", dump_wrong_offsets)
    with pytest.raises(BadFile, match="cannot be parsed"):
        decode(blob("key", value()), "key")


def value() -> Arrays:
    embeds = np.arange(6, dtype=np.uint16).reshape(3, 2)
    counts = np.array([7, 8], dtype=np.int64)
    return Arrays(
        (Array("embeds", "bfloat16", (3, 2), embeds.data), Array("counts", "int64", (2,), counts.data))
    )


def test_the_safetensors_package_reads_the_files() -> None:
    tensors = dict(safetensors.deserialize(bytes(blob("key", value()))))  # type: ignore[no-untyped-call]
    assert (tensors["embeds"]["dtype"], tensors["embeds"]["shape"]) == ("BF16", [3, 2])
    assert bytes(tensors["embeds"]["data"]) == np.arange(6, dtype=np.uint16).tobytes()
    assert np.frombuffer(bytes(tensors["counts"]["data"]), np.int64).tolist() == [7, 8]


def test_tensors_of_a_file_are_writable_and_have_names() -> None:
    """With a read-only buffer, torch would warn, and copy."""
    result = decode(blob("key", value()), "key")
    assert np.frombuffer(result["embeds"].data, np.uint16).flags.writeable
    assert np.frombuffer(result["counts"].data, np.int64).tolist() == [7, 8]
    assert [array.name for array in result.items] == ["embeds", "counts"]
    with pytest.raises(KeyError):
        result["deepstack"]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "why"),
    [
        ("a", "bfloat17", (2,), "bfloat17"),
        ("a", "bfloat16", (3,), "4 bytes for bfloat16"),
        ("a", "bfloat16", (-1, -2), "4 bytes for bfloat16"),
        ("__metadata__", "bfloat16", (2,), "cannot be called"),
    ],
)
def test_sizes_and_names_are_checked_at_once(name: str, dtype: str, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Array(name, dtype, shape, b"1234")


def test_equal_names_are_refused() -> None:
    array = Array("a", "uint8", (1,), b"1")
    with pytest.raises(ValueError, match="names repeat"):
        Arrays((array, array))
