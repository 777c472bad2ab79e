"""Files of a system that are not what they seem: reading stays bounded, and messages stay short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.core.errors import Forbidden, FoveaError, InvalidImage
from fovea.media.limits import MediaLimits, quote
from fovea.media.source import read_inside


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads from files."""
    sizes: list[int] = []
    read = os.read

    def counting(file: int, most: int) -> bytes:
        data = read(file, most)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "read", counting)
    return sizes


def test_a_sparse_file_is_refused_without_reading_it(tmp_path: Path, reads: list[int]) -> None:
    """A file of 100 GB takes no room on disk. Its first 20 MiB were read before it was refused."""
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(100 << 30)
    with pytest.raises(InvalidImage, match="holds 107374182400 bytes; accepted: at most 20971520") as caught:
        read_inside(path, MediaLimits(file_root=tmp_path))
    assert caught.value.code == "image_too_large"
    assert reads == []


def test_a_file_that_grows_is_read_up_to_the_limit(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "growing.png"
    path.write_bytes(bytes(10 << 20))
    small = os.stat_result((0o100600, 0, 0, 0, 0, 0, 100, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda _: small)
    with pytest.raises(InvalidImage, match="accepted: at most 2000000"):
        read_inside(path, MediaLimits(file_root=tmp_path, max_bytes=2_000_000))
    assert sum(reads) <= 2_000_000 + (1 << 20)


def test_files_of_the_system_end_with_an_error_or_their_data() -> None:
    """Files in /proc state no size. An error while reading one counted as a defect of Fovea (status 500)."""
    limits = MediaLimits(file_root=Path("/proc"))
    assert b"Name" in read_inside(Path("/proc/self/status"), limits)
    with pytest.raises(InvalidImage, match="cannot be read: Input/output error"):
        read_inside(Path("/proc/self/mem"), limits)
    with pytest.raises(Forbidden, match="not a regular file"):
        read_inside(Path("/proc/self/fd"), limits)


def test_a_device_is_not_read(reads: list[int]) -> None:
    with pytest.raises(Forbidden, match="not a regular file"):
        read_inside(Path("/dev/zero"), MediaLimits(file_root=Path("/dev")))
    assert reads == []


def test_long_paths_are_shortened_in_messages(tmp_path: Path) -> None:
    """A path of 8 KB came back whole, with its line breaks, in the answer and in the log."""
    limits = MediaLimits(file_root=tmp_path)
    for path in (tmp_path / "/".join(["a\nb" * 50] * 20), tmp_path / ("x" * 250), tmp_path / ("y" * 8000)):
        with pytest.raises(FoveaError) as caught:
            read_inside(path, limits)
        assert len(caught.value.message) < 300
        assert "\n" not in caught.value.message


def test_quote() -> None:
    assert quote("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert quote("a" * 100) == repr("a" * 100)
    assert quote("a" * 101) == repr("a" * 100 + "...")
