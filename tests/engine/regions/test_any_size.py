"""An image seen in parts: what each part is encoded from, where its tokens stand, and that company changes nothing."""

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
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ProcessedImage
from fovea.engine.vision.processor.qwen import QwenProcessor
from fovea.engine.vision.qwen import Block, QwenVisionTower
from fovea.engine.vision.slices import run_to_end
from fovea.kernels.native.build import library
from fovea.relevance.pipeline import Realization
from fovea.relevance.realizing import View
from fovea.relevance.regions import Region, partition
from tests.support.engines import all_at_once, assert_idle, engine
from tests.support.reduced import (
    GREEDY,
    QWEN,
    Decoder,
    features_of,
    grid_of,
    patchy_page,
    prepared_prompt,
    reduced_prompt,
)

pytestmark = pytest.mark.kernels

Checkpoints = Callable[[str], Path]
PAGE = patchy_page(31, 700, 1000)
QUESTION = reduced_prompt("read the small text", PAGE, keep=0.5)


@pytest.fixture(scope="module", params=QWEN)
def machine(request: pytest.FixtureRequest, checkpoint: Checkpoints) -> Iterator[Engine]:
    with engine(checkpoint(request.param)) as made:
        yield made


def parts(machine: Engine) -> AnySizeRegionEncoder:
    reducing = machine.runner._encoder._encode.__self__  # type: ignore[attr-defined]
    found: AnySizeRegionEncoder = reducing._region_encoder
    return found


def realized(machine: Engine, prompt: ChatPrompt) -> tuple[PlannedImage, Realization]:
    """What was seen where, after an answer."""
    machine.generate(prompt, **GREEDY)
    (planned,) = prepared_prompt(machine, prompt).images
    found = machine._intake.realization(planned.key)
    assert found is not None
    return planned, found


def pixels(machine: Engine, planned: PlannedImage) -> ProcessedImage:
    return process(planned, machine._preparer._pixels._processor)


def equal_regions(found: Realization) -> list[Region]:
    """Of the image's grid, as if it were blank: some are of one shape, so that one pass encodes them."""
    regions = list(partition(np.zeros(found.relevance.shape, bool)))
    assert len({(region.rows, region.columns) for region in regions}) < len(regions)
    return regions


def nobody() -> Iterator[ProcessedImage]:
    """Nothing is asked for beside it."""
    return iter(())


@torch.inference_mode()
def encode(
    machine: Engine, image: ProcessedImage, views: list[tuple[Region, tuple[int, int]]]
) -> list[VisualFeatures]:
    """Anew: nothing is kept before or after."""
    encoder = parts(machine)
    encoder.regions.clear()
    grid = image.arrays["propositional"].shape[0], image.arrays["propositional"].shape[1]
    pieces = [encoder._cutter.piece(image, grid, View(*view, ()), 1.0) for view in views]
    made = run_to_end(encoder._encode(pieces, nobody))
    encoder.regions.clear()
    return made


def test_regions_have_several_levels_here(machine: Engine) -> None:
    """What the other tests rely on: a whole, regions at native resolution, and some at a lower one."""
    _, found = realized(machine, QUESTION)
    first, *regions = found.allocation.layout.views
    assert first.tokens == first.shape[0] * first.shape[1]
    assert any(view.native for view in regions)
    assert any(
        not view.native
        for view in realized(machine, reduced_prompt("read it", PAGE, keep=0.2))[1].allocation.layout.views[
            1:
        ]
    )


@pytest.mark.parametrize("keep", [0.2, 0.5])
def test_every_token_stands_at_its_centre_in_the_whole_image(machine: Engine, keep: float) -> None:
    prompt = reduced_prompt("read the small text", PAGE, keep=keep)
    planned, found = realized(machine, prompt)
    (span,) = prepared_prompt(machine, prompt).spans
    expected = []
    for view in found.allocation.layout.views:
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
    assert grid_of(span) == found.relevance.shape
    assert planned.plan.tokens == len(expected)


def test_a_region_alone_is_a_region_in_a_batch(machine: Engine) -> None:
    """One pass for all of a shape, or one for each: equal up to float32's rounding."""
    planned, found = realized(machine, QUESTION)
    image = pixels(machine, planned)
    views = [(region, (region.rows, region.columns)) for region in equal_regions(found)]
    views += [(region, (3, 4)) for region, _ in views[:2]]
    together = encode(machine, image, views)
    for view, one in zip(views, together, strict=True):
        (alone,) = encode(machine, image, [view])
        assert one.embeds.shape[0] == view[1][0] * view[1][1]
        for ours, theirs in zip((one.embeds, *one.deepstack), (alone.embeds, *alone.deepstack), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_was_encoded_is_what_is_shown(machine: Engine) -> None:
    """The decoder sees each view's kept tokens, level by level of DeepStack."""
    planned, found = realized(machine, QUESTION)
    (span,) = prepared_prompt(machine, QUESTION).spans
    views = found.allocation.layout.views
    made = encode(machine, pixels(machine, planned), [(view.region, view.shape) for view in views])
    features = features_of(machine, span)
    for level, shown in enumerate((features.embeds, *features.deepstack)):
        rows = [
            (one.embeds, *one.deepstack)[level][list(view.token_indices)]
            for one, view in zip(made, views, strict=True)
        ]
        torch.testing.assert_close(shown, torch.cat(rows), atol=1e-5, rtol=1e-5)


def test_a_native_region_is_a_picture_of_its_own(checkpoint: Checkpoints) -> None:
    """Where no positions were learned, transformers' tower makes the same of the cut-out."""
    for architecture in ("qwen2_vl", "qwen2_5_vl"):
        decoder = Decoder(checkpoint(architecture))
        with engine(checkpoint(architecture)) as machine:
            planned, found = realized(machine, QUESTION)
            image, processor = pixels(machine, planned), machine._preparer._pixels._processor
            assert isinstance(processor, QwenProcessor)
            view = next(view for view in found.allocation.layout.views[1:] if view.native)
            patches = torch.from_numpy(processor.patches(cut_out(image, view, processor.factor)))
            expected, _ = decoder.encode(patches, (1, 2 * view.region.rows, 2 * view.region.columns))
            (made,) = encode(machine, image, [(view.region, view.shape)])
            torch.testing.assert_close(made.embeds, expected, atol=1e-4, rtol=1e-4)


def cut_out(image: ProcessedImage, view: View, side: int) -> Any:
    region = view.region
    rows = slice(region.row * side, (region.row + region.rows) * side)
    columns = slice(region.column * side, (region.column + region.columns) * side)
    return np.ascontiguousarray(image.arrays["rgb"][rows, columns])


def test_learned_positions_are_those_of_the_true_place(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What enters the first block for a native region is what enters it for the same patches of the whole image."""
    entered: list[Tensor] = []
    slices = Block.slices

    def noting(self: Block, x: Tensor, *rest: Any) -> Any:
        entered.append(x.clone())
        return slices(self, x, *rest)

    with engine(checkpoint("qwen3_vl")) as machine:
        planned, found = realized(machine, QUESTION)
        image, model = pixels(machine, planned), machine.runner.model
        assert isinstance(model, QwenVL)
        rows, columns = found.relevance.shape
        processor = machine._preparer._pixels._processor
        assert isinstance(processor, QwenProcessor)
        native = [(region, (region.rows, region.columns)) for region in equal_regions(found)]
        monkeypatch.setattr(Block, "slices", noting)
        patches = torch.from_numpy(processor.patches(image.arrays["rgb"]))
        with torch.inference_mode():
            run_to_end(model.vision.slices(patches, planned.plan.grid))
        whole = entered[0].view(rows, columns, 4, -1)
        depth = model.vision.config.depth
        entered.clear()
        encode(machine, image, native)
        made = torch.cat([x.view(-1, 4, x.shape[-1]) for x in entered[::depth]])
        shapes = list(dict.fromkeys(shape for _, shape in native))
        order = sorted(native, key=lambda view: shapes.index(view[1]))
        expected = [
            whole[r.row : r.row + r.rows, r.column : r.column + r.columns].flatten(0, 1) for r, _ in order
        ]
        torch.testing.assert_close(made, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_equal_regions_at_two_places_are_one_where_places_do_not_count(checkpoint: Checkpoints) -> None:
    """Blank paper: one entry for towers without learned positions, one per place for the others."""
    for architecture, shared in (("qwen2_vl", True), ("qwen3_vl", False)):
        with engine(checkpoint(architecture)) as machine:
            planned, _ = realized(machine, QUESTION)
            image = pixels(machine, planned)
            encoder, reduction = parts(machine), image.plan.reduction
            assert reduction is not None
            cut = np.full((64, 64, 3), 250, np.uint8)
            named, salt = encoder._cutter._make_name, reduction.salt
            views = [View(Region(row, 0, 2, 2), (2, 2), ()) for row in (0, 4)]
            names = {named(cut, (30, 20), view, salt) for view in views}
            assert (len(names) == 1) is shared
            other = named(cut, (30, 20), View(Region(0, 0, 2, 2), (1, 2), ()), salt)
            assert named(cut, (30, 20), views[0], "another tenant's") not in names
            assert other not in names, "the shape counts for all"


def written(done: Completion) -> list[tuple[int, float]]:
    return [(item.id, item.logprob) for item in done.logprobs[0]]


def test_an_answer_is_the_same_to_the_last_bit_alone_or_in_company() -> None:
    """On our own kernels, regions in batches of other sizes and all: caches are empty, warm, or shared with others in flight."""
    if library() is None:
        pytest.skip("this machine cannot run the C++ kernels")
    prompts = [
        *(
            reduced_prompt(words, PAGE, keep=0.5)
            for words in ("read the small text", "where is it?", "what colour?")
        ),
        reduced_prompt("what is it?", PAGE, method="dart", keep=0.25),
        reduced_prompt("what is it?", PAGE, patchy_page(32, 400, 300), method="dpp_query", budget=60),
        *(reduced_prompt("read it", patchy_page(seed, 700, 1000), keep=0.1) for seed in (33, 34)),
    ]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
    with Engine.from_pretrained(
        "fovea-tiny", device="cpu", dtype="bfloat16", kernels="native", threads=1, kv_cache_mib=64
    ) as native:
        alone = []
        for prompt in prompts:
            native.clear_caches()
            alone.append(written(native.generate(prompt, **options)))
        warm = [written(native.generate(prompt, **options)) for prompt in prompts]
        assert warm == alone
        native.clear_caches()
        with ThreadPoolExecutor(len(prompts)) as pool, all_at_once(native, len(prompts)):
            assert (
                list(pool.map(lambda prompt: written(native.generate(prompt, **options)), prompts)) == alone
            )
        assert_idle(native)


def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of the tower: pictures, and the patches of each, down and across."""
    seen: list[tuple[int, int, int]] = []
    slices = QwenVisionTower.slices

    def noting(self: QwenVisionTower, patches: Tensor, grid: tuple[int, int, int], *rest: Any) -> Any:
        seen.append(grid)
        return slices(self, patches, grid, *rest)

    monkeypatch.setattr(QwenVisionTower, "slices", noting)
    return seen


@torch.inference_mode()
def test_views_of_other_requests_go_along_where_a_slice_has_room(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pages of one size: a pass takes the same views of both, and what that makes of either is what it is alone."""
    encoder, seen = parts(machine), passes(monkeypatch)
    images = [
        pixels(
            machine, prepared_prompt(machine, reduced_prompt("read the small text", page, keep=0.3)).images[0]
        )
        for page in (PAGE, patchy_page(33, 700, 1000))
    ]
    alone = []
    for image in images:
        encoder.regions.clear()
        alone.append(run_to_end(encoder.slices(image, nobody)))
    before = sum(count for count, _, _ in seen)
    seen.clear()
    encoder.regions.clear()
    monkeypatch.setattr("fovea.engine.vision.slices.CPU_ROWS", 1 << 14)
    plain = pixels(
        machine, prepared_prompt(machine, reduced_prompt("what?", PAGE, method="dart", keep=0.3)).images[0]
    )
    together = [
        run_to_end(encoder.slices(images[0], lambda: iter([plain, images[1]]))),
        run_to_end(encoder.slices(images[1], nobody)),
    ]
    assert seen[0][0] == 2, "both wholes are seen in one pass"
    assert sum(count for count, _, _ in seen) == before, "and nothing twice"
    assert len(seen) < before
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours.places, theirs.places)  # type: ignore[arg-type]
        for made, wanted in zip(
            (ours.embeds, *ours.deepstack), (theirs.embeds, *theirs.deepstack), strict=True
        ):
            torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5)
    encoder.regions.clear()


@torch.inference_mode()
def test_nobody_goes_along_where_it_would_take_longer_or_be_lost(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice without room makes the first image wait for the second; without a cache the second would be encoded twice."""
    encoder = parts(machine)
    seen = passes(monkeypatch)
    first, second = (
        pixels(machine, prepared_prompt(machine, reduced_prompt("read it", page, keep=0.3)).images[0])
        for page in (PAGE, patchy_page(33, 700, 1000))
    )
    run_to_end(encoder.slices(first, nobody))
    expected = list(seen)
    for rows, capacity in ((64, encoder.regions.capacity), (1 << 14, 0)):
        monkeypatch.setattr("fovea.engine.vision.slices.CPU_ROWS", rows)
        monkeypatch.setattr(encoder.regions._ledger, "capacity", capacity)
        encoder.regions.clear()
        seen.clear()
        run_to_end(encoder.slices(first, lambda: iter([second])))
        assert seen == expected


@torch.inference_mode()
def test_what_goes_wrong_with_an_image_that_would_go_along_is_its_own(
    machine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image in the queue that could not be judged failed all that were before it, and said nothing of itself."""
    encoder = parts(machine)
    first, bad, third = (
        pixels(
            machine,
            prepared_prompt(
                machine, reduced_prompt("read it", patchy_page(seed, 700, 1000), keep=0.3)
            ).images[0],
        )
        for seed in (41, 42, 43)
    )
    tensions = encoder._relevance.tensions

    def failing(survey: Any, reduction: Any, total: int) -> Any:
        if bad.plan.reduction is reduction:
            raise MemoryError("too large")
        return tensions(survey, reduction, total)

    monkeypatch.setattr(encoder._relevance, "tensions", failing)
    monkeypatch.setattr("fovea.engine.vision.slices.CPU_ROWS", 1 << 14)
    seen = passes(monkeypatch)
    encoder.regions.clear()
    run_to_end(encoder.slices(first, lambda: iter([bad, third])))
    assert seen[0][0] == 2, "the third went along"
    with pytest.raises(MemoryError):
        run_to_end(encoder.slices(bad, nobody))
    run_to_end(encoder.slices(third, nobody))
    encoder.regions.clear()
