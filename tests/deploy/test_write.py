import os
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError
from fovea.deploy.target import Check, check_path, run_check
from fovea.deploy.write import write


def test_a_second_run_changes_only_what_is_rendered_differently(tmp_path: Path) -> None:
    first = write({"a/b.yaml": "1", "run.sh": "#!/bin/sh\n", "old": "x"}, tmp_path)
    assert first.created == ("a/b.yaml", "old", "run.sh")
    assert os.access(tmp_path / "run.sh", os.X_OK)
    second = write({"a/b.yaml": "2", "run.sh": "#!/bin/sh\n"}, tmp_path)
    assert (second.changed, second.unchanged, second.removed) == (("a/b.yaml",), ("run.sh",), ("old",))
    assert not (tmp_path / "old").exists()


def test_an_edited_file_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    write({"a": "1", "b": "1"}, tmp_path)
    (tmp_path / "a").write_text("edited")
    with pytest.raises(ConfigError, match="a in .* was edited"):
        write({"a": "2", "b": "2"}, tmp_path)
    assert (tmp_path / "b").read_text() == "1"
    write({"a": "2", "b": "2"}, tmp_path, force=True)
    assert (tmp_path / "a").read_text() == "2"


def test_a_manifest_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "victim"
    outside.write_text("")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".fovea-deploy.json").write_text(
        '{"../victim": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}'
    )
    write({"a": "1"}, folder)
    assert outside.exists()


@pytest.mark.parametrize("link", ["nginx.conf", ".fovea-deploy.json", "config", "old"])
@pytest.mark.parametrize("force", [False, True])
def test_a_link_in_the_folder_chooses_no_file_outside(tmp_path: Path, link: str, force: bool) -> None:
    """A folder that others may write into could otherwise have files of the operator replaced or removed."""
    home, folder = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    write({"nginx.conf": "1", "config/engine.toml": "1", "old": "1"}, folder)
    at = folder / link
    at.rename(home / "precious")
    at.symlink_to(home / "precious")
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="is a link"):
        write({"nginx.conf": "2", "config/engine.toml": "2"}, folder, force=force)
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


def test_a_link_to_nothing_creates_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="is a link"):
        write({"a": "1"}, tmp_path / "out")
    assert not (tmp_path / "victim").exists()


def test_a_pipe_in_the_folder_does_not_stop_the_command(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ConfigError, match="is not a file"):
        write({"a": "1"}, tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "1", '"a"', '{"a": 1}', '{"\\u0000": "x"}', '{"": "x"}', '{".": "x"}', "[" * 100_000]
)
def test_a_manifest_of_others_is_no_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / ".fovea-deploy.json").write_text(text)
    assert write({"b": "1"}, tmp_path).created == ("b",)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a"])
def test_paths_leave_the_folder_never(path: str) -> None:
    with pytest.raises(ValueError, match="returned the path"):
        check_path(path)


def test_a_check_passes_fails_or_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert run_check(Check("ls", ("{dir}/x",), "file"), tmp_path).status == "passed"
    assert run_check(Check("ls", ("{dir}/y",), "file"), tmp_path).status == "failed"
    assert run_check(Check("echo", ("a warning",), "file"), tmp_path).status == "passed"
    assert run_check(Check("echo", ("a warning",), "file", silent=True), tmp_path).status == "failed"
    skipped = run_check(Check("no-such-tool", (), "file"), tmp_path)
    assert (skipped.status, skipped.output) == ("skipped", "not installed: no-such-tool")
