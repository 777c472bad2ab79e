"""The name of what engines must have in common."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fovea.engine.peers.layout import checkpoint_files, layout_name

NAMES = ("embed", "layers.0.norm", "layers.0.weight", "layers.1.norm", "layers.1.weight", "merger", "head")


def write(folder: Path) -> Path:
    folder.mkdir()
    dice = np.random.default_rng(1)
    tensors = {name: dice.standard_normal((300, 400 if "weight" in name else 3)) for name in NAMES}
    tensors |= {f"layers.{number}.weight": dice.standard_normal((300, 400)) for number in range(2, 12)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "README.md").write_text("a model")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("layouts") / "model")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "a copy"))


def test_a_copy_has_the_same_layout_wherever_it_lies(checkpoint: Path, copy: Path) -> None:
    assert layout_name(checkpoint_files(copy), "bfloat16", 16) == layout_name(
        checkpoint_files(checkpoint), "bfloat16", 16
    )
    (copy / "README.md").write_text("the same model, with other words")
    assert layout_name(checkpoint_files(copy), "bfloat16", 16) == layout_name(
        checkpoint_files(checkpoint), "bfloat16", 16
    )


def test_every_detail_counts(checkpoint: Path) -> None:
    names = {layout_name(checkpoint_files(checkpoint), *details) for details in [
        ("bfloat16", 16), ("bfloat16", 32), ("float32", 16), ("bfloat16", "16", ""), ("bfloat1", 616), (),
    ]}  # fmt: skip
    assert len(names) == 6


@pytest.mark.parametrize("name", NAMES)
def test_other_weights_in_one_tensor_are_another_layout(name: str, checkpoint: Path, copy: Path) -> None:
    """Also in a small one: training often changes only some of them."""
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, copy / "model.safetensors")
    assert layout_name(checkpoint_files(copy)) != layout_name(checkpoint_files(checkpoint))


def test_other_settings_of_the_model_are_another_layout(checkpoint: Path, copy: Path) -> None:
    (copy / "config.json").write_text('{"a": 2}')
    assert layout_name(checkpoint_files(copy)) != layout_name(checkpoint_files(checkpoint))


def test_a_file_more_or_of_another_name_is_another_layout(checkpoint: Path, copy: Path) -> None:
    (copy / "config.json").rename(copy / "b.json")
    renamed = layout_name(checkpoint_files(copy))
    (copy / "more.json").write_text("{}")
    assert len({layout_name(checkpoint_files(checkpoint)), renamed, layout_name(checkpoint_files(copy))}) == 3


def test_a_single_file_has_a_layout(copy: Path) -> None:
    file = copy / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(3 << 20))
    before = layout_name(checkpoint_files(file))
    file.write_bytes(b"GGUF" + bytes((3 << 20) - 1) + b"x")
    assert layout_name(checkpoint_files(file)) != before


def test_a_damaged_header_is_no_error(copy: Path) -> None:
    """The loader reports it."""
    for data in (b"", b"abc", b"\xff" * 100, (1 << 60).to_bytes(8, "little") + b"{" * 100):
        (copy / "model.safetensors").write_bytes(data)
        assert layout_name(checkpoint_files(copy))
