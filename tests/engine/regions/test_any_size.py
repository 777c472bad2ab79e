"""Tests of region encoding on towers for any size: pieces, places of tokens, and shared batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fovea import Engine
from fovea.core.types import ChatPrompt, Completion
from fovea.engine.models.qwen_vl import QwenVL
from fovea.engine.regions.any_size import AnySizeRegionEncoder
from fovea.engine.request.prompt_plan import PlannedImage, process
from fovea.engine.vision.any_size import Block
from fovea.engine.vision.built.engines import EncoderEngines, largest_difference
from fovea.engine.vision.encoding import VisualFeatures, run_to_end
from fovea.engine.vision.glm4v import Glm4vTower
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.qwen import QwenVisionTower
from fovea.engine.vision.siglip import NaViT
from fovea.relevance.pipeline import Realization
from fovea.relevance.realizing import Region, View, partition
from tests.support.engines import all_at_once, assert_idle, engine
from tests.support.pixels import in_time
from tests.support.programs import need_kernels
from tests.support.reduced import (
    ANY_SIZE,
    GREEDY,
    Decoder,
    features_of,
    focused_looks,
    grid_of,
    patchy_page,
    prepared_prompt,
    reduced_prompt,
)
from tests.support.thorough import is_thorough, others_slow

pytestmark = pytest.mark.kernels

Checkpoints = Callable[[str], Path]
PAGE = patchy_page(31, 700, 1000)
QUESTION = reduced_prompt("read the small text", PAGE, keep=0.5)
LOWER = 0.22
"""A share of the page's tokens at which the last of the chosen regions has a lower resolution."""


USUAL = [name for name in ANY_SIZE if name != "qwen2_vl"]
"""Architectures of the default run. Qwen2-VL has the tower of Qwen2.5-VL without windows."""
ONE = pytest.mark.parametrize("architecture", others_slow(ANY_SIZE, ["qwen3_vl"]), indirect=True)
"""For tests of what does not depend on the tower. With the fixture's order, nothing is made twice."""


@pytest.fixture(scope="module", params=others_slow(ANY_SIZE, USUAL))
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", autouse=True)
def looks() -> Iterator[None]:
    with focused_looks():
        yield


@pytest.fixture(scope="module")
def machine(architecture: str, checkpoint: Checkpoints) -> Iterator[Engine]:
    with engine(checkpoint(architecture)) as machine:
        yield machine


def region_encoder(machine: Engine) -> AnySizeRegionEncoder:
    visual_encoder = machine.runner._encoder._encode.__self__  # type: ignore[attr-defined]
    encoder: AnySizeRegionEncoder = visual_encoder._region_encoder
    return encoder


def forget(encoder: AnySizeRegionEncoder) -> None:
    """Empty the region cache, and forget all layouts, so that every question looks again."""
    encoder.regions.clear()
    encoder._relevance._realizations.clear()


def realize(machine: Engine, prompt: ChatPrompt) -> tuple[PlannedImage, Realization]:
    """The planned image and its realization, after an answer."""
    machine.generate(prompt, **GREEDY)
    (planned,) = prepared_prompt(machine, prompt).images
    realization = machine.parts.intake.find_realization(planned.key)
    assert realization is not None
    return planned, realization


def pixels(machine: Engine, planned: PlannedImage) -> ProcessedImage:
    return process(planned, machine.parts.preparer.builder.processor)


def equal_regions(realization: Realization) -> list[Region]:
    """The regions of a blank image of this grid. Some have the same shape, so one pass encodes them."""
    regions = list(partition(np.zeros(realization.relevance.shape, bool)))
    assert len({(region.rows, region.columns) for region in regions}) < len(regions)
    return regions


def no_images() -> Iterator[ProcessedImage]:
    """No other images are waiting."""
    return iter(())


@torch.inference_mode()
def encode(
    machine: Engine, image: ProcessedImage, views: list[tuple[Region, tuple[int, int]]]
) -> list[VisualFeatures]:
    """Encode views without cached regions, and leave none."""
    encoder = region_encoder(machine)
    encoder.regions.clear()
    grid = image.arrays["propositional"].shape[0], image.arrays["propositional"].shape[1]
    pieces = [encoder._cutter.piece(image, grid, View(*view, ()), 1.0) for view in views]
    outputs = run_to_end(encoder._encode(pieces, no_images))
    encoder.regions.clear()
    return outputs


def test_regions_have_several_levels_here(machine: Engine) -> None:
    """The other tests need a view of the whole, native regions, and regions at a lower resolution."""
    _, realization = realize(machine, QUESTION)
    first, *regions = realization.allocation.layout.views
    assert 0 < first.tokens < first.shape[0] * first.shape[1], "some tokens are those of a native region"
    assert any(view.native for view in regions)
    _, lower = realize(machine, reduced_prompt("read the small text", PAGE, keep=LOWER))
    assert any(not view.native for view in lower.allocation.layout.views[1:])


def test_regions_use_the_built_encoders_of_their_shapes(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a region is in its image is no part of an encoder that was built ahead of time."""
    planned, realization = realize(machine, QUESTION)
    image, encoder = pixels(machine, planned), region_encoder(machine)
    regions = equal_regions(realization)
    views = [(region, (region.rows, region.columns)) for region in regions]
    plain = encode(machine, image, views)
    built = machine.runner.model.static_encoder()
    if built is None:
        assert encoder._built is None, "only Qwen's towers can be built"
        return
    shapes = {shape for _, shape in views}
    shapes.remove(first := views[0][1])
    grids = [(1, rows * built.tower.merge, columns * built.tower.merge) for rows, columns in shapes]
    engines = EncoderEngines({grid: built.segments(grid, 1) for grid in grids})
    monkeypatch.setattr(encoder, "_engines", engines)
    for one, other in zip(encode(machine, image, views), plain, strict=True):
        for found, expected in zip(one.tensors, other.tensors, strict=True):
            assert largest_difference(found, expected) < 1e-4
    without = sum(shape == first for _, shape in views)
    assert (engines.hits, engines.misses) == (len(views) - without, without)
    assert min(engines.hits, engines.misses) > 0


@pytest.mark.parametrize("keep", [LOWER, 0.5])
def test_the_place_of_a_token_is_its_centre_in_the_whole_image(machine: Engine, keep: float) -> None:
    prompt = reduced_prompt("read the small text", PAGE, keep=keep)
    planned, realization = realize(machine, prompt)
    (span,) = prepared_prompt(machine, prompt).spans
    expected = []
    for view in realization.allocation.layout.views:
        region, (rows, columns) = view.region, view.shape
        for number in view.token_indices:
            down, across = divmod(number, columns)
            expected.append(
                [
                    region.row + (2 * down + 1) * region.rows // (2 * rows),
                    region.column + (2 * across + 1) * region.columns // (2 * columns),
                ]
            )
    places = features_of(machine, span).places
    assert places is not None
    assert places.tolist() == expected
    assert grid_of(span) == realization.relevance.shape
    assert planned.plan.tokens == len(expected)


def test_a_region_has_the_same_output_alone_and_in_a_batch(machine: Engine) -> None:
    """One pass for all views of a shape, or one pass for each view: equal up to float32's rounding."""
    planned, realization = realize(machine, QUESTION)
    image = pixels(machine, planned)
    views = [(region, (region.rows, region.columns)) for region in equal_regions(realization)]
    views += [(region, (3, 4)) for region, _ in views[:2]]
    batched = encode(machine, image, views)
    for view, one in zip(views, batched, strict=True):
        (alone,) = encode(machine, image, [view])
        assert one.embeds.shape[0] == view[1][0] * view[1][1]
        for ours, theirs in zip((one.embeds, *one.deepstack), (alone.embeds, *alone.deepstack), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_features_are_the_kept_tokens_of_all_views(machine: Engine) -> None:
    """The image's features are each view's kept tokens, at every level of DeepStack."""
    planned, realization = realize(machine, QUESTION)
    (span,) = prepared_prompt(machine, QUESTION).spans
    views = realization.allocation.layout.views
    outputs = encode(machine, pixels(machine, planned), [(view.region, view.shape) for view in views])
    features = features_of(machine, span)
    for level, shown in enumerate((features.embeds, *features.deepstack)):
        rows = [
            (one.embeds, *one.deepstack)[level][list(view.token_indices)]
            for one, view in zip(outputs, views, strict=True)
        ]
        torch.testing.assert_close(shown, torch.cat(rows), atol=1e-5, rtol=1e-5)


def test_a_native_region_is_a_picture_of_its_own(checkpoint: Checkpoints) -> None:
    """Without learned positions, transformers' tower gives the same output for the crop."""
    for architecture in ("qwen2_vl", "qwen2_5_vl"):
        decoder = Decoder(checkpoint(architecture))
        with engine(checkpoint(architecture)) as machine:
            planned, realization = realize(machine, QUESTION)
            image, processor = pixels(machine, planned), machine.parts.preparer.builder.processor
            assert isinstance(processor, QwenProcessor)
            view = next(view for view in realization.allocation.layout.views[1:] if view.native)
            patches = torch.from_numpy(in_time(processor.patches(cut_out(image, view, processor.factor))))
            expected, _ = decoder.encode(patches, (1, 2 * view.region.rows, 2 * view.region.columns))
            (output,) = encode(machine, image, [(view.region, view.shape)])
            torch.testing.assert_close(output.embeds, expected, atol=1e-4, rtol=1e-4)


def cut_out(image: ProcessedImage, view: View, side: int) -> Any:
    region = view.region
    rows = slice(region.row * side, (region.row + region.rows) * side)
    columns = slice(region.column * side, (region.column + region.columns) * side)
    return np.ascontiguousarray(image.arrays["rgb"][rows, columns])


def test_learned_positions_are_those_of_the_true_place(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A native region and the same patches of the whole image give the first block equal inputs."""
    inputs: list[Tensor] = []
    before = Block.before

    def record(self: Block, x: Tensor, *rest: Any) -> Any:
        inputs.append(x.clone())
        return before(self, x, *rest)

    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 1 << 14)  # a block is called once

    with engine(checkpoint("qwen3_vl")) as machine:
        planned, realization = realize(machine, QUESTION)
        image, model = pixels(machine, planned), machine.runner.model
        assert isinstance(model, QwenVL)
        rows, columns = realization.relevance.shape
        processor = machine.parts.preparer.builder.processor
        assert isinstance(processor, QwenProcessor)
        native = [(region, (region.rows, region.columns)) for region in equal_regions(realization)]
        monkeypatch.setattr(Block, "before", record)
        patches = torch.from_numpy(processor.patches(image.arrays["rgb"]))
        with torch.inference_mode():
            run_to_end(model.vision.slices(patches, planned.plan.grid))
        whole = inputs[0].view(rows, columns, 4, -1)
        depth = model.vision.config.depth
        inputs.clear()
        encode(machine, image, native)
        outputs = torch.cat([x.view(-1, 4, x.shape[-1]) for x in inputs[::depth]])
        shapes = list(dict.fromkeys(shape for _, shape in native))
        order = sorted(native, key=lambda view: shapes.index(view[1]))
        expected = [
            whole[r.row : r.row + r.rows, r.column : r.column + r.columns].flatten(0, 1) for r, _ in order
        ]
        torch.testing.assert_close(outputs, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_equal_regions_share_a_name_if_places_do_not_matter(machine: Engine, architecture: str) -> None:
    """Two blank regions have one name for towers without learned positions, else one name per place."""
    planned, _ = realize(machine, QUESTION)
    image = pixels(machine, planned)
    encoder, reduction = region_encoder(machine), image.plan.reduction
    assert reduction is not None
    cut = np.full((64, 64, 3), 250, np.uint8)
    make_name, salt = encoder._cutter._make_name, reduction.salt
    views = [View(Region(row, 0, 2, 2), (2, 2), ()) for row in (0, 4)]
    names = {make_name(cut, (30, 20), view, salt) for view in views}
    assert (len(names) == 1) is (architecture in ("qwen2_vl", "qwen2_5_vl"))
    other = make_name(cut, (30, 20), View(Region(0, 0, 2, 2), (1, 2), ()), salt)
    assert make_name(cut, (30, 20), views[0], "another tenant's") not in names
    assert other not in names, "the shape is part of every name"


def ids_and_logprobs(done: Completion) -> list[tuple[int, float]]:
    return [(item.id, item.logprob) for item in done.logprobs[0]]


def test_an_answer_is_equal_to_the_last_bit_alone_and_with_others() -> None:
    """On our own kernels, an answer depends neither on batches nor on the content of caches."""
    need_kernels()
    width, height = (700, 1000) if is_thorough() else (360, 500)
    page, *others = (
        patchy_page(seed, width, height) for seed in ((31, 33, 34) if is_thorough() else (31, 33))
    )
    prompts = [
        *(
            reduced_prompt(words, page, keep=0.5)
            for words in ("read the small text", "where is it?", "what colour?")
        ),
        reduced_prompt("what is it?", page, method="dart", keep=0.25),
        reduced_prompt("what is it?", page, patchy_page(32, 400, 300), method="dpp_query", budget=60),
        *(reduced_prompt("read it", other, keep=0.1) for other in others),
    ]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": True}
    with Engine.from_pretrained(
        "fovea-tiny", device="cpu", dtype="bfloat16", kernels="native", threads=1, kv_cache_mib=16
    ) as native:
        alone = []
        for prompt in prompts:
            native.clear_caches()
            alone.append(ids_and_logprobs(native.generate(prompt, **options)))
        warm = [ids_and_logprobs(native.generate(prompt, **options)) for prompt in prompts]
        assert warm == alone
        native.clear_caches()
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(native, len(prompts)):
            assert (
                list(pool.map(lambda prompt: ids_and_logprobs(native.generate(prompt, **options)), prompts))
                == alone
            )
        assert_idle(native)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The passes of the tower: for each, number of pictures, and rows and columns of patches."""
    grids: list[tuple[int, int, int]] = []
    for tower in (QwenVisionTower, NaViT, Glm4vTower):

        def record(
            self: Any, patches: Tensor, grid: tuple[int, int, int], *rest: Any, slices: Any = tower.slices
        ) -> Any:
            grids.append(grid)
            return slices(self, patches, grid, *rest)

        monkeypatch.setattr(tower, "slices", record)
    return grids


@ONE
@torch.inference_mode()
def test_views_of_other_requests_fill_up_a_slice(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two pages of one size, a pass encodes the same views of both. Each page's outputs do not change."""
    encoder, grids = region_encoder(machine), passes(monkeypatch)
    images = [
        pixels(
            machine, prepared_prompt(machine, reduced_prompt("read the small text", page, keep=0.3)).images[0]
        )
        for page in (PAGE, patchy_page(33, 700, 1000))
    ]
    alone = []
    for image in images:
        forget(encoder)
        alone.append(run_to_end(encoder.slices(image, no_images)))
    before = sum(count for count, _, _ in grids)
    grids.clear()
    forget(encoder)
    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 1 << 14)
    plain = pixels(
        machine, prepared_prompt(machine, reduced_prompt("what?", PAGE, method="dart", keep=0.3)).images[0]
    )
    batched = [
        run_to_end(encoder.slices(images[0], lambda: iter([plain, images[1]]))),
        run_to_end(encoder.slices(images[1], no_images)),
    ]
    assert grids[0][0] == 2, "one pass encodes both views of the whole"
    assert sum(count for count, _, _ in grids) == before, "no view is encoded twice"
    assert len(grids) < before
    for ours, theirs in zip(batched, alone, strict=True):
        assert torch.equal(ours.places, theirs.places)  # type: ignore[arg-type]
        for outputs, expected in zip(
            (ours.embeds, *ours.deepstack), (theirs.embeds, *theirs.deepstack), strict=True
        ):
            torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)
    encoder.regions.clear()


@ONE
@torch.inference_mode()
def test_no_other_views_are_added_without_room_in_slice_and_cache(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room in the slice, the first image would wait for the second.

    Without room in the cache, the second would be encoded twice.
    """
    encoder = region_encoder(machine)
    grids = passes(monkeypatch)
    first, second = (
        pixels(machine, prepared_prompt(machine, reduced_prompt("read it", page, keep=0.3)).images[0])
        for page in (PAGE, patchy_page(33, 700, 1000))
    )
    forget(encoder)
    run_to_end(encoder.slices(first, no_images))
    expected = list(grids)
    for rows, capacity in ((64, encoder.regions.capacity), (1 << 14, 0)):
        monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", rows)
        monkeypatch.setattr(encoder.regions._ledger, "capacity", capacity)
        forget(encoder)
        grids.clear()
        run_to_end(encoder.slices(first, lambda: iter([second])))
        assert grids == expected


@ONE
@torch.inference_mode()
def test_an_error_of_an_image_in_the_queue_fails_only_that_image(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an image in the queue that could not be cut into views failed the images before it."""
    encoder = region_encoder(machine)
    first, bad, third = (
        pixels(
            machine,
            prepared_prompt(
                machine, reduced_prompt("read it", patchy_page(seed, 700, 1000), keep=0.3)
            ).images[0],
        )
        for seed in (41, 42, 43)
    )
    cut = encoder._cutter._cut

    def cut_or_error(image: ProcessedImage, view: View) -> Any:
        if image is bad:
            raise MemoryError("too large")
        return cut(image, view)

    monkeypatch.setattr(encoder._cutter, "_cut", cut_or_error)
    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", 1 << 14)
    grids = passes(monkeypatch)
    forget(encoder)
    run_to_end(encoder.slices(first, lambda: iter([bad, third])))
    assert grids[0][0] == 2, "the third image filled up the batch"
    with pytest.raises(MemoryError):
        run_to_end(encoder.slices(bad, no_images))
    run_to_end(encoder.slices(third, no_images))
    encoder.regions.clear()
