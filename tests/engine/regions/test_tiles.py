"""Tests of relevance with tiles (LLaVA-NeXT): only the tiles that a question needs are encoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from fovea import Engine
from fovea.core.errors import InvalidRequest
from fovea.core.media import PixelBudget, VisualTokens
from fovea.engine.models.llava import TiledLlava
from fovea.engine.vision.encoding import VisualFeatures, run_to_end
from tests.support.checkpoints import write

QUESTION = "what is in the red circle?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("llava_next", tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(scope="module")
def machine(folder: Path) -> Engine:
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=8) as machine:
        yield machine


def _page(width: int, height: int) -> PIL.Image.Image:
    """A white page with noise in its lower right corner."""
    pixels = np.full((height, width, 3), 255, np.uint8)
    noise = np.random.default_rng(1).integers(0, 255, (height // 3, width // 3, 3), dtype=np.uint8)
    pixels[-noise.shape[0] :, -noise.shape[1] :] = noise
    return PIL.Image.fromarray(pixels)


def _encode(machine: Engine, page: PIL.Image.Image, wish: VisualTokens | None) -> VisualFeatures:
    """The output of the engine's encoder for the image. wish: None: all tokens."""
    preparer = machine.parts.preparer
    prompt = machine.request(QUESTION, [page], budget=PixelBudget(visual=wish), max_tokens=1).prompt
    [planned] = preparer.builder.outline(prompt).images
    from fovea.engine.request.prompt_plan import process

    processed = process(planned, preparer.builder.processor)
    return run_to_end(machine.runner._encoder._encode(processed, lambda: iter(())))


@pytest.mark.parametrize("size", [(90, 60), (60, 90), (100, 40), (64, 64)])
def test_kept_tokens_are_those_of_the_whole_encoding(machine: Engine, size: tuple[int, int]) -> None:
    page = _page(*size)
    with torch.inference_mode():
        full = _encode(machine, page, None)
        count = full.embeds.shape[0]
        for keep in (0.6, 0.9):
            some = _encode(machine, page, VisualTokens("relevance", keep=keep))
            assert some.embeds.shape[0] == -(-count * round(keep * 10) // 10)
            assert some.places is not None
            numbers = some.places[:, 0].tolist()
            assert numbers == sorted(set(numbers))
            base = machine.runner.model.side**2
            assert numbers[:base] == list(range(base))
            torch.testing.assert_close(some.embeds, full.embeds[numbers], rtol=1e-4, atol=1e-5)


def test_tiles_without_kept_tokens_are_not_encoded(machine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _page(90, 60)
    encoded: list[int] = []
    tiles = TiledLlava.tiles

    def count_tiles(self: TiledLlava, image: object) -> object:
        encoded.append(len(image.arrays["pixel_values"]))
        return tiles(self, image)

    monkeypatch.setattr(TiledLlava, "tiles", count_tiles)
    with torch.inference_mode():
        _encode(machine, page, None)
        [all_tiles] = encoded
        encoded.clear()
        full = machine.outline(machine.request(QUESTION, [page]).prompt).image_tokens
        base = machine.runner.model.side**2
        _encode(machine, page, VisualTokens("relevance", budget=base + 4))
    assert encoded[0] == 1
    assert 1 < sum(encoded) < all_tiles
    assert base + 4 < full


def test_answers_keep_the_budget_and_report_it(machine: Engine) -> None:
    page = _page(90, 60)
    full = machine.generate(QUESTION, [page], max_tokens=3)
    wish = PixelBudget(visual=VisualTokens("relevance", keep=0.7, explain=True))
    some = machine.generate(QUESTION, [page], budget=wish, max_tokens=3)
    assert some.images[0].method == "relevance"
    assert some.images[0].full == full.images[0].tokens
    assert some.usage.image == some.images[0].tokens < full.usage.image
    assert some.images[0].relevance is not None
    assert sum(region["tokens"] for region in some.images[0].relevance["regions"]) == some.usage.image - 16
    machine.check_integrity()


def test_a_budget_below_the_view_of_the_whole_is_refused(machine: Engine) -> None:
    wish = PixelBudget(visual=VisualTokens("relevance", budget=10))
    with pytest.raises(InvalidRequest, match="view of the whole image has 16"):
        machine.generate(QUESTION, [_page(90, 60)], budget=wish, max_tokens=1)


def test_methods_that_need_the_encoders_attention_are_refused(machine: Engine) -> None:
    wish = PixelBudget(visual=VisualTokens("visionzip", keep=0.5))
    with pytest.raises(InvalidRequest, match="needs the attention inside the vision encoder"):
        machine.generate(QUESTION, [_page(90, 60)], budget=wish, max_tokens=1)
