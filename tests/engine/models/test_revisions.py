"""A revision pins a checkpoint of the hub to one state."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.core.errors import CheckpointError, ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model, resolve
from tests.support.hub import hub_cache

CONFIG = EngineConfig.of(dtype="float32", device="cpu", kv_blocks=16)


@pytest.fixture
def hub(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of huggingface_hub with two commits of org/name: main, and the tag v1."""
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        hub_cache(qwen, tmp_path, commit)
        (tmp_path / "hub" / "models--org--name" / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants._is_offline", True, raising=False)
    return tmp_path / "hub"


@pytest.mark.parametrize(("revision", "commit"), [("", "a"), ("main", "a"), ("v1", "b"), ("b" * 40, "b")])
def test_a_revision_names_a_commit_of_the_hub(
    hub: Path, revision: str, commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one, a server that restarted could get another model, from whoever owns the repository."""
    caplog.set_level("INFO", "fovea.engine")
    assert resolve("org/name", revision).name == commit * 40
    assert f"org/name: revision {revision or 'main'} is commit {commit * 40}" in caplog.text


def test_an_engine_loads_the_revision_of_its_settings(hub: Path) -> None:
    assert load_model("org/name", CONFIG.changed(revision="v1")).info.name == "org/name"
    with pytest.raises(CheckpointError, match="'org/name' at revision 'v2' could not be downloaded"):
        load_model("org/name", CONFIG.changed(revision="v2"))


@pytest.mark.parametrize("name", ["fovea-tiny", "FOLDER"])
def test_a_folder_has_no_revision(qwen: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is a folder; revisions are those of hub ids"):
        load_model(name.replace("FOLDER", str(qwen)), CONFIG.changed(revision="main"))


@pytest.mark.parametrize("revision", ["../main", "a/../b", "/main", "-x", "a b", "a//b", "refs/"])
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(ConfigError, match="revision is .*accepted: a branch"):
        CONFIG.changed(revision=revision)
