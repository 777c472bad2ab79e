"""Images that are encoded together, as on a GPU, get the features that each of them gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fovea.core.media import PixelBudget
from fovea.engine.load import LoadedModel
from fovea.engine.vision import graphs as graphs_module
from fovea.engine.vision.calls import BlocksCall, Member, apply_by_rows, encode_together, run_blocks
from fovea.engine.vision.encoding import Slices, VisualFeatures
from fovea.engine.vision.graphs import BlockGraphs
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.kernels.spans import Spans, attend_each
from fovea.kernels.torch_kernels import TorchKernels
from tests.support.checkpoints import ARCHITECTURES
from tests.support.engines import picture, shared_model
from tests.support.fake_cuda import Graph, Recording

SIZES = ((150, 100), (64, 96), (150, 100), (200, 230))


def images(loaded: LoadedModel) -> list[ProcessedImage]:
    return [
        loaded.processor.process(
            picture(seed, *size), loaded.processor.plan(*size, PixelBudget())
        )
        for seed, size in enumerate(SIZES)
    ]  # fmt: skip


def together(slices: Sequence[Slices[Any]], graphs: BlockGraphs | None = None) -> list[Member[Any]]:
    members = [Member(each) for each in slices]
    for _ in encode_together(members, merge=True, graphs=graphs):
        pass
    return members


def same(one: VisualFeatures, other: VisualFeatures) -> None:
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@torch.inference_mode()
def test_images_of_any_sizes_do_not_change_each_other(
    architecture: str, checkpoint: Callable[[str], Path]
) -> None:
    loaded = shared_model(checkpoint(architecture))
    pictures = images(loaded)
    alone = [loaded.model.encode(image) for image in pictures]
    for member, features in zip(
        together([loaded.model.encode_slices(image) for image in pictures]), alone, strict=True
    ):
        same(member.result, features)


BY_BLOCKS = (
    "gemma3",
    "glm46v",
    "idefics3",
    "internvl",
    "llava",
    "paddleocr_vl",
    "pixtral",
    "qwen2_5_vl",
)


@pytest.mark.parametrize("architecture", BY_BLOCKS)
@torch.inference_mode()
def test_blocks_run_once_for_all_images(architecture: str, checkpoint: Callable[[str], Path]) -> None:
    """Four images cost the launches of one, apart from what is done for each picture before and after."""
    loaded = shared_model(checkpoint(architecture))
    calls: list[int] = []
    attend = TorchKernels.attend_spans

    def count(qkv: Tensor, spans: Spans, heads: int) -> Tensor:
        calls.append(len(qkv))
        return attend(qkv, spans, heads)

    kernels = [
        block.attention.kernels
        for module in loaded.model.modules()
        if hasattr(block := module, "attention") and hasattr(block.attention, "kernels")
    ]
    assert kernels
    with mock.patch.object(TorchKernels, "attend_spans", staticmethod(count)):
        together([loaded.model.encode_slices(image) for image in images(loaded)[:1]])
        blocks = len(calls)
        together([loaded.model.encode_slices(image) for image in images(loaded)])
    assert blocks > 0
    assert len(calls) == 2 * blocks


@torch.inference_mode()
def test_an_image_that_fails_or_is_given_up_changes_no_other(checkpoint: Callable[[str], Path]) -> None:
    loaded = shared_model(checkpoint("qwen2_5_vl"))
    pictures = images(loaded)

    def broken(image: ProcessedImage) -> Slices[VisualFeatures]:
        yield from apply_by_rows(lambda x: x, torch.zeros(3, 4))
        raise ValueError("these are no pixels")

    members = [
        Member(broken(pictures[0])), *(Member(loaded.model.encode_slices(image)) for image in pictures[1:]),
    ]  # fmt: skip
    with mock.patch("fovea.engine.vision.calls.ROWS_PER_SLICE", 1):
        steps = encode_together(members, merge=True)
        next(steps)
        members[2].close()
        for _ in steps:
            pass
    assert str(members[0].error) == "these are no pixels"
    assert members[2].result is None
    for number in (1, 3):
        same(members[number].result, loaded.model.encode(pictures[number]))


class Block:
    """A block whose attention reads bounds on the device alone, as FlashAttention does."""

    def __init__(self) -> None:
        self.attention: Any = self
        self.heads = 2
        self.kernels: Any = self
        self.weight = torch.randn(8, 24)

    def project(self, x: Tensor) -> Tensor:
        return (x @ self.weight).view(len(x), 6, 4)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.project(x) * cos + sin

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        return x + mixed

    @staticmethod
    def attend_spans(qkv: Tensor, spans: Spans, heads: int) -> Tensor:
        number = torch.searchsorted(spans.bounds, torch.arange(len(qkv), dtype=torch.int32), right=True)
        query, key, value = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
        mask = number[:, None] == number[None]
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.transpose(0, 1).flatten(1)


def run(blocks: list[Block], rows: list[int], graphs: BlockGraphs | None) -> list[Tensor]:
    """Rows of pictures through blocks: the first attends among twenty rows, the second to whole pictures."""
    draw = torch.Generator().manual_seed(sum(rows))

    def slices(count: int) -> Slices[Tensor]:
        x, cos, sin = (torch.randn(*shape, generator=draw) for shape in ((count, 8), *((count, 1, 4),) * 2))
        return (yield from run_blocks(blocks, x, cos, sin, (((1, count),), ((count // 20, 20),)), (1, 0)))  # type: ignore[arg-type]

    return [member.result for member in together([slices(count) for count in rows], graphs)]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are recorded, by a stand-in that replays exactly what it noted."""
    made: list[Graph] = []

    class Recorded(Graph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def capture_begin(self, **options: Any) -> None:
            self._recording = Recording(self)
            self._recording.__enter__()

        def capture_end(self) -> None:
            self._recording.__exit__(None, None, None)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(graphs_module, "fits_one_launch", lambda dtype, dim: True)
    return made


@torch.inference_mode()
def test_a_graph_serves_all_pictures_of_about_its_rows(recordings: list[Graph]) -> None:
    """It is recorded at the second time, with padding, and later rows and bounds are its inputs."""
    blocks, graphs = [Block(), Block()], BlockGraphs()
    for number, rows in enumerate(([40], [20, 20, 400], [300, 200], [500], [20], [700], [900, 40])):
        for mine, expected in zip(run(blocks, rows, graphs), run(blocks, rows, None), strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
        # Up to 512 rows there are two graphs: for pictures of at most SHORT rows, and for larger ones.
        assert len(recordings) == [0, 0, 1, 1, 2, 2, 3][number]


@torch.inference_mode()
def test_many_rows_or_pictures_are_computed_without_a_graph(
    recordings: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_ROWS", 1024)
    blocks, graphs = [Block(), Block()], BlockGraphs()
    for _ in range(3):
        run(blocks, [1040], graphs)
        run(blocks, [300] + [20] * graphs_module.FEW_SPANS, graphs)
    assert not recordings


@torch.inference_mode()
def test_an_encoder_that_cannot_be_recorded_runs_without_graphs(
    recordings: list[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Reading(Block):
        def after(self, mixed: Tensor, x: Tensor) -> Tensor:
            return x + mixed * len(mixed.isnan().nonzero())

    blocks, graphs = [Reading(), Reading()], BlockGraphs()
    for _ in range(4):
        (mine,) = run(blocks, [40], graphs)
        (expected,) = run(blocks, [40], None)
        torch.testing.assert_close(mine, expected)
    assert len(recordings) == 1
    assert "the encoder runs without CUDA graphs" in caplog.text


def test_spans_of_equal_neighbours_are_one_run() -> None:
    spans = Spans.of(((2, 3), (1, 3), (1, 5)), torch.device("cpu"))
    assert spans.runs == ((3, 3), (1, 5))
    assert spans.bounds.tolist() == [0, 3, 6, 9, 14]
    assert spans.longest == 5
    qkv = torch.randn(14, 6, 8)
    torch.testing.assert_close(attend_each(qkv, spans, 2), Block.attend_spans(qkv, spans, 2))


def test_calls_of_other_blocks_are_not_joined() -> None:
    one, other = ([Block()] for _ in range(2))
    x, runs = torch.zeros(4, 8), (((1, 4),),)
    keys = {
        BlocksCall(tuple(blocks), x, None, None, runs, (0,)).key  # type: ignore[arg-type]
        for blocks in (one, other)
    }
    assert len(keys) == 2
