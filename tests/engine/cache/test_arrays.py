"""Tensors in a file: what goes in comes out, what was touched is refused, and other readers understand it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from fovea.engine.cache.arrays import DTYPES, Array, Arrays, BadFile, decode, encode


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
    again = decode(file, key)
    assert again == arrays
    start = np.frombuffer(file, np.uint8).ctypes.data
    for array in again.items:
        if array.nbytes:
            assert (np.frombuffer(array.data, np.uint8).ctypes.data - start) % array.itemsize == 0


@given(arrays=some_arrays(), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_noticed(arrays: Arrays, where: float, flip: int) -> None:
    file = blob("key", arrays)
    file[int(where * len(file))] ^= flip
    with pytest.raises(BadFile):
        decode(file, "key")


@given(arrays=some_arrays(), where=st.floats(0, 1, exclude_max=True))
def test_a_beginning_is_not_a_file(arrays: Arrays, where: float) -> None:
    file = blob("key", arrays)
    with pytest.raises(BadFile):
        decode(file[: int(where * len(file))], "key")
    with pytest.raises(BadFile, match="checksum"):
        decode(file + b"\0", "key")


@given(noise=st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(BadFile):
        decode(bytearray(noise), "key")


def test_another_key_and_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = blob("one", value())
    with pytest.raises(BadFile, match="another key"):
        decode(file, "two")
    monkeypatch.setattr("fovea.engine.cache.arrays.VERSION", "9")
    with pytest.raises(BadFile, match="version is '1', not '9'"):
        decode(file, "one")


def test_a_header_of_nonsense_with_a_right_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = json.dumps

    def bent(header: dict[str, dict[str, object]], **how: object) -> str:
        header["embeds"]["data_offsets"] = [0, 999]
        return real(header, separators=(",", ":"))

    monkeypatch.setattr("fovea.engine.cache.arrays.json.dumps", bent)
    with pytest.raises(BadFile, match="cannot be parsed"):
        decode(blob("key", value()), "key")


def value() -> Arrays:
    embeds = np.arange(6, dtype=np.uint16).reshape(3, 2)
    counts = np.array([7, 8], dtype=np.int64)
    return Arrays(
        (Array("embeds", "bfloat16", (3, 2), embeds.data), Array("counts", "int64", (2,), counts.data))
    )


def test_other_readers_of_safetensors_understand_it() -> None:
    tensors = dict(safetensors.deserialize(bytes(blob("key", value()))))  # type: ignore[no-untyped-call]
    assert (tensors["embeds"]["dtype"], tensors["embeds"]["shape"]) == ("BF16", [3, 2])
    assert bytes(tensors["embeds"]["data"]) == np.arange(6, dtype=np.uint16).tobytes()
    assert np.frombuffer(bytes(tensors["counts"]["data"]), np.int64).tolist() == [7, 8]


def test_what_is_read_can_be_written_to_and_found_by_name() -> None:
    """A read-only buffer would make torch complain, and copy."""
    again = decode(blob("key", value()), "key")
    assert np.frombuffer(again["embeds"].data, np.uint16).flags.writeable
    assert np.frombuffer(again["counts"].data, np.int64).tolist() == [7, 8]
    assert [array.name for array in again.items] == ["embeds", "counts"]
    with pytest.raises(KeyError):
        again["deepstack"]


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


def test_a_name_is_there_once() -> None:
    array = Array("a", "uint8", (1,), b"1")
    with pytest.raises(ValueError, match="names repeat"):
        Arrays((array, array))
