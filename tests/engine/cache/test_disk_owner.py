"""The disk cache reads no outputs that another user could have written: they decide what the model sees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.engine.cache.disk_files import path_of
from tests.support.disks import ENTRY, Open, arrays_of, store_values, value_of

OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_to_turns_the_store_off(
    open_store: Open, folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user wrote entries there, with checksums that fit, and the model saw their pictures."""
    folder.mkdir()
    folder.chmod(mode)
    store = open_store()
    store_values(store, "a")
    assert arrays_of(store, "a") is None
    assert "others may write to" in (store.stats().off or "")
    assert f"chmod go-w {folder}" in caplog.text
    folder.chmod(0o700)
    store.clear()
    store_values(store, "a")
    assert arrays_of(store, "a") == value_of("a", ENTRY), "clearing tries the folder again"


@ROOT
def test_a_folder_of_another_user_turns_the_store_off(open_store: Open, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER, OTHER)
    assert f"belongs to user {OTHER}" in (open_store().stats().off or "")


def test_a_link_to_a_folder_of_ones_own_is_used(open_store: Open, folder: Path, tmp_path: Path) -> None:
    """Operators put such folders on another disk."""
    (tmp_path / "disk").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "disk")
    store = open_store()
    store_values(store, "a")
    assert arrays_of(store, "a") == value_of("a", ENTRY)


@pytest.mark.parametrize(
    "expose",
    [
        pytest.param(lambda file: os.chown(file, OTHER, OTHER), marks=ROOT, id="owner"),
        pytest.param(lambda file: os.chmod(file, 0o666), id="mode"),
    ],
)
def test_a_file_that_another_user_can_change_is_a_miss(
    open_store: Open, folder: Path, expose: object, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    store_values(store, "a")
    expose(path_of(folder, "a"))  # type: ignore[operator]
    assert arrays_of(store, "a") is None
    assert "left alone" in caplog.text
    assert store.stats().off is None
