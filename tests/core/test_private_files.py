"""Folders and files that another user could change are recognised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fovea.core.private_files import exposure, private_folder, read_private, temporary_folder

OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def test_a_folder_of_ones_own_is_private(tmp_path: Path) -> None:
    assert exposure(tmp_path) is None
    assert exposure(tmp_path / "not" / "there") is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_a_folder_that_others_may_write_to_is_not(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert f"(mode {mode:04o}; chmod go-w" in (exposure(tmp_path) or "")


def test_a_parent_that_others_may_write_to_exposes_the_folder(tmp_path: Path) -> None:
    """They could move the folder away and put another one in its place, unless the parent is sticky."""
    (tmp_path / "own").mkdir(mode=0o700)
    tmp_path.chmod(0o777)
    assert str(tmp_path) in (exposure(tmp_path / "own") or "")
    assert private_folder(tmp_path / "new") is not None
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o1777)
    assert exposure(tmp_path / "own") is None
    assert private_folder(tmp_path / "new") is None
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_links_are_followed_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "own").mkdir(mode=0o700)
    (tmp_path / "way").symlink_to("open/own")
    (tmp_path / "loop").symlink_to("loop")
    assert exposure(tmp_path / "way") == f"{tmp_path}/way is a symbolic link"
    assert f"write to {tmp_path}/open" in (exposure(tmp_path / "way" / "x") or "")
    assert "too many symbolic links" in (exposure(tmp_path / "loop" / "x") or "")
    (tmp_path / "closed").mkdir()
    (tmp_path / "up").symlink_to("../" + tmp_path.name + "/closed")
    assert exposure(tmp_path / "up" / "x") is None


@ROOT
def test_the_owner_of_a_folder_a_link_or_a_file_can_change_it(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    assert f"theirs belongs to user {OTHER}" in (exposure(tmp_path / "theirs" / "x") or "")
    (tmp_path / "own").mkdir()
    (tmp_path / "way").symlink_to("own")
    os.chown(tmp_path / "way", OTHER, OTHER, follow_symlinks=False)
    assert f"way belongs to user {OTHER}" in (exposure(tmp_path / "way" / "x") or "")
    (tmp_path / "file").write_bytes(b"x")
    os.chown(tmp_path / "file", OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        read_private(tmp_path / "file")


def test_files_are_opened_without_links_and_never_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert read_private(tmp_path / "file") == b"x"
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "open").write_bytes(b"x")
    (tmp_path / "open").chmod(0o666)
    for name in ("link", "pipe", "open"):
        with pytest.raises(OSError, match="symbolic links|not a regular file|others may write"):
            read_private(tmp_path / name)


def test_a_temporary_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exposure(temporary_folder()) is None
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "open"))
    with pytest.raises(PermissionError, match="no private folder for temporary files"):
        temporary_folder()


@ROOT
def test_a_file_that_is_a_mount_of_its_own_is_noticed(tmp_path: Path) -> None:
    """Containers that mount the keys file alone never see the file that `fovea keys revoke` puts there."""
    for name in ("file", "folder/file", "other/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    code = (
        "import sys; from pathlib import Path; from fovea.core.private_files import is_mounted_alone\n"
        "print([is_mounted_alone(Path(name)) for name in sys.argv[1:]])"
    )
    names = [str(tmp_path / name) for name in ("file", "folder/file", "missing")]
    lines = f'mount --bind {names[0]} {names[0]}; mount --bind {tmp_path}/other {tmp_path}/folder; exec "$@"'
    shell = ["unshare", "--mount", "sh", "-ec", lines, "sh"]
    done = subprocess.run([*shell, sys.executable, "-c", code, *names], capture_output=True, text=True)
    if done.stderr.startswith("unshare:"):  # in a chroot, for example
        pytest.skip(done.stderr)
    assert done.stdout == "[True, False, False]\n", done.stderr
