"""Caches of compilers are folders that no other user can change, because their machine code is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fovea.core.private_files import exposure
from fovea.kernels import choose


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*(choose.__dict__[n] for n in ("TORCH", "TRITON", "FLASHINFER")), "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_torch_compiles_into_the_users_own_cache(home: Path) -> None:
    """Its own default is a name in /tmp. A user who took that name first could put machine code there."""
    choose.secure_torch_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / "cache" / "fovea" / "torch")
    assert (home / "cache" / "fovea" / "torch").stat().st_mode & 0o777 == 0o700


def test_a_folder_of_the_operator_is_used_if_it_is_private(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "shared").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "shared"))
    choose.secure_torch_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / "shared")
    (home / "shared").chmod(0o777)
    choose.secure_torch_cache()
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert chosen != home / "shared"
    assert exposure(chosen) is None
    assert f"TORCHINDUCTOR_CACHE_DIR: others may write to {home / 'shared'}" in caplog.text


def test_caches_of_gpu_compilers_are_checked(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    choose.secure_gpu_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(home / ".triton" / "cache")
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(home)
    assert not caplog.text
    (home / ".cache").mkdir()
    (home / ".cache").chmod(0o777)
    choose.secure_gpu_caches()
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] != str(home)
    assert f"others may write to {home / '.cache'}" in caplog.text
