"""The file with the heads that look: what is written is read, and a bad file is an error that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.core.errors import CheckpointError
from fovea.core.names import bundled_model
from fovea.engine.models.look_heads import (
    MOST_BYTES,
    MOST_HEADS,
    PATH,
    heads_digest,
    read_heads,
    write_heads,
)

KNOWN = [(layer, head) for layer in range(4) for head in range(4)]
pairs = st.tuples(st.integers(0, 99), st.integers(0, 99))


def write(folder: Path, content: bytes) -> Path:
    path = folder / PATH
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def test_heads_are_read_as_they_were_written(tmp_path: Path) -> None:
    heads = ((1, 0), (3, 2), (3, 3))
    path = write_heads(tmp_path, heads)
    assert path == tmp_path / "fovea" / "look.json"
    assert read_heads(tmp_path) == read_heads(tmp_path, KNOWN) == heads
    write_heads(tmp_path, [(2, 1)])
    assert read_heads(tmp_path, KNOWN) == ((2, 1),), "written again"


@given(heads=st.lists(pairs, min_size=1, max_size=MOST_HEADS))
def test_any_heads_come_back_ascending_and_once(
    tmp_path_factory: pytest.TempPathFactory, heads: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("heads")
    write_heads(folder, heads)
    assert read_heads(folder) == tuple(sorted(set(heads)))
    assert read_heads(folder, heads) == tuple(sorted(set(heads)))


def test_without_a_file_no_heads_were_chosen(tmp_path: Path) -> None:
    assert read_heads(tmp_path) is None
    (tmp_path / PATH).mkdir(parents=True)
    assert read_heads(tmp_path) is None, "a folder of that name"


def test_the_bundled_model_has_heads() -> None:
    assert read_heads(bundled_model(), KNOWN)


BAD: dict[str, bytes] = {
    "no JSON": b"x" * 100,
    "no text": b"\xff\xfe",
    "nothing": b"",
    "a list": b"[[3, 2]]",
    "nested deeply": b"[" * 5000,
    "a number that is none": b'{"heads": [[NaN, 2]]}',
}
LISTS: dict[str, Any] = {
    "no heads": None,
    "an empty list": [],
    "a number": 3,
    "text": "[[3, 2]]",
    "a table": {"3": 2},
    "single numbers": [3, 2],
    "three numbers": [[3, 2, 1]],
    "one number": [[3]],
    "fractions": [[3.0, 2]],
    "truth values": [[True, 2]],
    "negative": [[3, -2]],
    "one bad among good ones": [[3, 2], [3, "2"]],
    "too many": [[0, head] for head in range(MOST_HEADS + 1)],
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read|{path}: heads must be a list"):
        read_heads(tmp_path, KNOWN)


@pytest.mark.parametrize("heads", LISTS.values(), ids=LISTS.keys())
def test_heads_of_another_form(tmp_path: Path, heads: Any) -> None:
    path = write(tmp_path, json.dumps({"heads": heads}).encode())
    with pytest.raises(CheckpointError, match=f"{path}: heads must be a list of 1 to 256 pairs"):
        read_heads(tmp_path, KNOWN)


@pytest.mark.parametrize("heads", [[[4, 0]], [[0, 0], [3, 4]], [[10**30, 0]]])
def test_heads_that_the_model_lacks(tmp_path: Path, heads: list[list[int]]) -> None:
    path = write(tmp_path, json.dumps({"heads": heads}).encode())
    layer, head = heads[-1]
    with pytest.raises(
        CheckpointError, match=f"{path}: the model has no head {head} .* in layer {layer}; remove"
    ):
        read_heads(tmp_path, KNOWN)
    assert read_heads(tmp_path) is not None, "without a model all are accepted"


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"heads": [[3, 2]]}'.ljust(MOST_BYTES + 1))
    with pytest.raises(CheckpointError, match=f"{path} has {MOST_BYTES + 1} bytes; accepted: at most"):
        read_heads(tmp_path, KNOWN)
    path.write_bytes(b'{"heads": [[3, 2]]}'.ljust(MOST_BYTES))
    assert read_heads(tmp_path, KNOWN) == ((3, 2),)


def test_other_heads_have_another_digest() -> None:
    """It is part of cache keys, so that other heads do not find the layouts of these."""
    digests = [
        heads_digest(heads) for heads in (None, (), ((3, 2),), ((3, 3),), ((3, 2), (3, 3)), ((32, 3),))
    ]
    assert len(set(digests)) == len(digests)
    assert heads_digest([(3, 2)]) == heads_digest(((3, 2),))


def test_gguf_files_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    for path in (one, other):
        path.write_bytes(b"GGUF")
    write_heads(one, [(3, 2)])
    assert read_heads(one) == ((3, 2),)
    assert read_heads(other) is read_heads(tmp_path) is None
    assert [path.name for path in (tmp_path / "fovea").iterdir()] == ["one.json"]
