"""A process reads only its share of a checkpoint: the parts joined are the whole, and few bytes are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fovea.core.errors import CheckpointError
from fovea.engine.config import EngineConfig
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.ranks import Ranks
from fovea.engine.load import load_model, load_share
from fovea.engine.models import stored as stored_weights
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.stored import SafetensorsWeights
from fovea.engine.models.targets import Cut
from fovea.engine.models.weights import Packer, _codes_part
from fovea.engine.parallel import shares
from fovea.engine.parallel.shares import Grid
from fovea.kernels.codes import Codes
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.checkpoints.text import write_text
from tests.support.gguf_files import write_model
from tests.support.quantized import SCHEMES, quantize_folder
from tests.support.thorough import others_slow


class Lonely(Ranks):
    """A process with a place in a grid, and no others."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.rank, self.size = grid, grid.rank, grid.size
        self.tensor_rank, self.tensor_size, self.stages = grid.tensor_rank, grid.tensor, grid.pipeline

    def share(self, config: DecoderConfig) -> DecoderConfig:
        return shares.share_of(config, self.grid)

    def head_rows(self, config: DecoderConfig) -> tuple[int, int]:
        return shares.head_rows(config, self.grid)

    def cut(self, config: DecoderConfig, name: str) -> Cut | None:
        return shares.cut_of(config, name, self.grid)

    def skipped(self, config: DecoderConfig) -> tuple[str, ...]:
        return shares.skipped(config, self.grid)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave weights as they are loaded."""
    monkeypatch.setattr(Packer, "_pack", lambda self, layer: None)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of safetensors files."""
    sizes: list[int] = []
    read = SafetensorsWeights._read

    def note(self: SafetensorsWeights, file: int, entry: Any, offset: int, buffer: Tensor) -> None:
        sizes.append(buffer.nbytes)
        read(self, file, entry, offset, buffer)

    monkeypatch.setattr(SafetensorsWeights, "_read", note)
    return sizes


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig.of(**{"dtype": "float32", "device": "cpu", "kernels": "torch", **changes})


def share(folder: Path, grid: Grid, **changes: Any) -> VisionLanguageModel:
    return load_share(str(folder), settings(**changes), Lonely(grid))[0]


def tensors(model: VisionLanguageModel) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.checkpoint_targets() if "decoder.layers." in name}


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(
    "architecture", others_slow(ARCHITECTURES, ("qwen3_5_moe", "internvl_chat", "mistral3", "lfm2_vl"))
)
def test_the_shares_of_workers_are_parts_of_the_whole(
    architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(architecture)
    whole = load_model(str(folder), settings()).model
    seen: set[str] = set()
    for rank in (1, 3):
        grid = Grid(rank, 2, 2)
        seen |= expect_parts(whole, share(folder, grid), grid)
    missing = tensors(whole).keys() - seen
    assert all(".bias" in name or "cross_attn" in name for name in missing), missing


def expect_parts(whole: VisionLanguageModel, own: VisionLanguageModel, grid: Grid) -> set[str]:
    """Assert that the tensors of a share are parts of the whole's. Returns their names."""
    expected, found = tensors(whole), tensors(own)
    for name, tensor in found.items():
        full, cut = expected[name], shares.cut_of(whole.whole, name, grid)
        if cut is not None:
            flat = full.reshape(*full.shape[: cut.axis], cut.size, -1)  # views may have more axes
            full = torch.cat([flat.narrow(cut.axis, a, b - a) for a, b in cut.runs], cut.axis)
        assert torch.equal(tensor.reshape(-1), full.reshape(-1)), name
    return set(found)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("scheme", ["awq", "gptq-act-order", "w4a16", "fp8-blocks", "nvfp4"])
def test_shares_of_weights_that_are_stored_quantized(scheme: str, tmp_path: Path) -> None:
    folder = quantize_folder(write("qwen3_vl", tmp_path / "plain"), tmp_path / "quantized", SCHEMES[scheme])
    whole = load_model(str(folder), settings(quantization="dequantize")).model
    for rank in range(1, 4):
        grid = Grid(rank, 4)
        own = share(folder, grid, quantization="dequantize")
        assert expect_parts(whole, own, grid)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_shares_of_gguf_files(kind: str, tmp_path: Path) -> None:
    """Llama's queries and keys are stored in another order there."""
    path = write_model(write_text(kind, tmp_path / "plain"), tmp_path / "model.gguf")
    whole = load_model(str(path), settings()).model
    assert expect_parts(whole, share(path, Grid(1, 2)), Grid(1, 2))


@pytest.mark.usefixtures("unpacked")
def test_exactly_the_bytes_of_a_share_are_read(
    qwen: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of maps that are divided by columns, if the parts of a row are not too short."""
    monkeypatch.setattr(stored_weights, "SHORT_RUN", 1)
    model = share(qwen, Grid(1, 2))
    own = [*tensors(model).values(), model.head.lm_head.weight]
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in own)
    assert sum(bytes_read) < 0.4 * sum(path.stat().st_size for path in qwen.glob("*.safetensors"))


def test_short_parts_of_rows_are_read_with_what_lies_between(tmp_path: Path, bytes_read: list[int]) -> None:
    matrix = torch.arange(24 * 8, dtype=torch.float32).view(24, 8)
    save_file({"x": matrix}, tmp_path / "model.safetensors")
    stored = SafetensorsWeights([tmp_path / "model.safetensors"])
    (_, (entry,)), *_ = stored.files
    for cut, size in ((Cut(0, ((2, 5), (7, 8)), 24), 4 * 32), (Cut(1, ((0, 2), (6, 8)), 8), 24 * 32)):
        bytes_read.clear()
        parts = [matrix.narrow(cut.axis, start, stop - start) for start, stop in cut.runs]
        target = torch.empty_like(torch.cat(parts, cut.axis))
        assert stored.read_part(0, entry, target, cut) == sum(bytes_read) == size
        assert torch.equal(target, torch.cat(parts, cut.axis))
    stored.close()


def test_codes_are_divided_between_groups_alone() -> None:
    codes = Codes(torch.arange(64, dtype=torch.uint8).view(2, 32) % 16, 4, 8, torch.rand(2, 4), 8)
    part = codes.columns(8, 24)
    assert torch.equal(part.values(), codes.values()[:, 8:24])
    assert torch.equal(codes.columns(16, 32).values(), codes.values()[:, 16:])
    with pytest.raises(ValueError, match="columns 4 to 20 divide groups of 8"):
        codes.columns(4, 20)
    outer = Codes(
        codes.codes, 4, 4, torch.ones(2, 8, dtype=torch.int8), 8, outer=torch.rand(2, 2), outer_groups=4
    )
    assert torch.equal(outer.columns(16, 32).values(), outer.values()[:, 16:])
    rows = Codes(codes.codes, 4, 32, torch.rand(2, 1), 8)
    assert torch.equal(rows.columns(3, 9).values(), rows.values()[:, 3:9])


def test_a_format_that_cannot_be_divided_is_named() -> None:
    codes = Codes(torch.zeros(2, 64, dtype=torch.uint8), 4, 32, torch.rand(2, 2), 8)
    with pytest.raises(CheckpointError, match="down_proj cannot be divided .* dequantize"):
        _codes_part(codes, Cut(1, ((16, 48),), 64), "down_proj")
