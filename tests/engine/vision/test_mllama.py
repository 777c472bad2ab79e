"""The tower of Llama 3.2 Vision and its projector, compared with transformers with equal random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from fovea.core.errors import UnsupportedModel
from fovea.core.media import PixelBudget
from fovea.engine.layers.linear import checkpoint_targets
from fovea.engine.models.mllama import Mllama
from fovea.engine.models.targets import canonical
from fovea.engine.models.towers import mllama_tower
from fovea.engine.request.inputs import to_image
from fovea.engine.vision.encoding import run_to_end
from fovea.engine.vision.processor import build
from fovea.engine.vision.processor.mllama import grids_of
from tests.support.checkpoints import write
from tests.support.reference import Reference, own_processor

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_global_layers": 2,
    "attention_heads": 4, "image_size": 56, "patch_size": 14, "intermediate_layers_indices": [2, 0],
    "vision_output_dim": 96, "norm_eps": 1e-3,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "cross_attention_layers": [1], "pad_token_id": 0,
}  # fmt: skip
PROCESSOR: dict[str, Any] = {"size": {"height": 56, "width": 56}, "max_image_tiles": 4}
TILE_ROWS = 17
GRIDS = grids_of(4)


def configuration(**changes: Any) -> Any:
    return hf.MllamaConfig(vision_config={**VISION, **changes}, text_config=TEXT)


def pair(**changes: Any) -> tuple[Mllama, Any]:
    """Our vision part and transformers' whole model, with equal weights. All gates are open."""
    config = configuration(**changes)
    theirs = hf.MllamaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 0.2 * noise + (0.7 if parameter.ndim == 1 else 0.0)
    stored = {canonical(name): tensor for name, tensor in theirs.state_dict().items()}
    stored = {name: tensor for name, tensor in stored.items() if name.startswith(("vision.", "projector."))}
    ours = Mllama(config)
    targets = {name: t for name, t in checkpoint_targets(ours) if name.startswith(("vision.", "projector."))}
    assert targets.keys() == stored.keys()
    for name, target in targets.items():
        assert target.shape == stored[name].shape
        target.copy_(stored[name])
    return ours, theirs


def their_rows(theirs: Any, pixels: Tensor, grid_id: Tensor) -> Tensor:
    """All rows of transformers' tower, (4 * rows of a tile, width), for one image of some tiles."""
    padded, mask = pixels.new_zeros(1, 1, 4, *pixels.shape[1:]), torch.zeros(1, 1, 4, dtype=torch.int64)
    padded[0, 0, : len(pixels)], mask[0, 0, : len(pixels)] = pixels, 1
    tower = theirs.model.vision_model
    output = tower(padded, aspect_ratio_ids=grid_id[None], aspect_ratio_mask=mask).last_hidden_state
    assert output.shape[:4] == (1, 1, 4, TILE_ROWS)
    return output.flatten(0, 3)


@torch.inference_mode()
@pytest.mark.parametrize("rows_of_a_slice", [512, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rows_are_those_of_transformers(
    grid: tuple[int, int], rows_of_a_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every grid of 1 to 4 tiles; also the rows of padding, which influence the rows of the image."""
    monkeypatch.setattr("fovea.engine.vision.encoding.CPU_ROWS", rows_of_a_slice)
    monkeypatch.setattr("fovea.engine.vision.mllama.PAIRS_PER_ROW", 300)
    ours, theirs = pair()
    tiles = grid[0] * grid[1]
    pixels = torch.randn(tiles, 3, 56, 56, generator=torch.Generator().manual_seed(tiles))
    grid_id = torch.tensor([1 + GRIDS.index(grid)])
    rows = run_to_end(ours.vision.slices(pixels, grid_id))
    expected = their_rows(theirs, pixels, grid_id)
    assert rows.shape == expected.shape == (4 * TILE_ROWS, 96)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_padding_takes_part() -> None:
    """Without the rows of padding, the rows of the image would be others."""
    ours, _ = pair()
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    first = run_to_end(ours.vision.slices(pixels, torch.tensor([1])))[:TILE_ROWS]
    table = ours.vision.gated_positional_embedding.tile_embedding.weight
    table.view(9, 4, TILE_ROWS, 32)[1, 3] *= -1.0  # positions of the last tile, which is padding here
    second = run_to_end(ours.vision.slices(pixels, torch.tensor([1])))[:TILE_ROWS]
    assert float((first - second).abs().max()) > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("size", [(50, 40), (100, 30), (30, 150), (113, 112), (60, 999)], ids=str)
def test_states_of_an_image_are_those_of_transformers(size: tuple[int, int]) -> None:
    """Processor, tower and projector together."""
    ours, theirs = pair()
    rng = np.random.default_rng(size)
    picture = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    source = to_image(picture)
    processor = build("mllama", PROCESSOR, {"vision_config": theirs.config.vision_config.to_dict()})
    prepared = processor.process(source, processor.plan(*size, PixelBudget()))
    states = run_to_end(ours.state_slices(prepared))
    inputs = MllamaImageProcessorPil(**PROCESSOR)(images=[[picture]], return_tensors="pt")
    tiles = inputs.pop("num_tiles")[0][0]
    rows = theirs.model.vision_model(**inputs).last_hidden_state
    expected = theirs.model.multi_modal_projector(rows)[0, 0, :tiles].flatten(0, 1)
    assert states.shape == (prepared.plan.states, 40) == (tiles * TILE_ROWS, 40)
    torch.testing.assert_close(states, expected, atol=2e-4, rtol=2e-4)


@torch.inference_mode()
def test_the_shape_counts_the_rows_that_are_computed() -> None:
    ours, _ = pair()
    counts: list[int] = []

    def count(_module: nn.Module, inputs: tuple[Any, ...], _output: Tensor) -> None:
        counts.append(inputs[0].shape[0])

    ours.vision.patch_embedding.register_forward_hook(count)
    ours.vision.transformer.layers[0].get_submodule("mlp").register_forward_hook(count)
    ours.projector.register_forward_hook(count)
    processor = build("mllama", PROCESSOR, {"vision_config": VISION})
    source = to_image(Image.new("RGB", (150, 50)))
    prepared = processor.process(source, processor.plan(150, 50, PixelBudget()))
    shape = ours.visual_shape(prepared.plan)
    run_to_end(ours.state_slices(prepared))
    assert counts == [shape.patches, shape.rows, shape.projector_rows] == [3 * 16, 4 * 24, 3 * 17]
    assert (shape.hidden, shape.pairs) == (32, 6 * (51 * 96 + 45 * 51))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": [14, 14]}, r"patch_size is \[14, 14\]; accepted: an integer"),
        ({"intermediate_layers_indices": [4, 0]}, r"indices \[4, 0\]; accepted: some of 0 to 3"),
        ({"intermediate_layers_indices": [-1, 0]}, "accepted: some of 0 to 3"),
        ({"vision_output_dim": 64}, "vision_output_dim is 64; accepted: 96"),
    ],
    ids=str,
)
def test_what_the_tower_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        mllama_tower(configuration(**changes).vision_config)


@torch.inference_mode()
def test_the_checkpoint_of_the_tests_has_the_real_layout(tmp_path: Path) -> None:
    """The vision part loads from its files; transformers answers, and sees images only after their token."""
    folder = write("mllama", tmp_path)
    config = hf.AutoConfig.from_pretrained(folder)
    image, tail = config.image_token_index, [70, 71, 72]
    assert config.text_config.vocab_size == image
    reference = Reference(folder)
    rng = np.random.default_rng(0)
    first, second = (Image.fromarray(rng.integers(0, 256, (70, 50, 3), dtype=np.uint8)) for _ in range(2))

    stored = {canonical(name): tensor for name, tensor in reference.model.state_dict().items()}
    assert stored["decoder.embed_tokens.weight"].shape[0] == image + 8
    assert stored["lm_head.weight"].shape[0] == image
    ours = Mllama(config)
    for name, target in ours.checkpoint_targets():
        target.copy_(stored[name])
    source = to_image(first)
    prepared = own_processor(folder).process(source, own_processor(folder).plan(50, 70, PixelBudget()))
    states = run_to_end(ours.state_slices(prepared))
    outputs: list[Tensor] = []
    reference.model.model.multi_modal_projector.register_forward_hook(
        lambda _module, _inputs, output: outputs.append(output)
    )
    one = reference.logits([60, 61, image, 65], [first], tail)
    expected = outputs[0].flatten(0, 3)[: len(states)]
    torch.testing.assert_close(states, expected, atol=2e-4, rtol=2e-4)
    other = reference.logits([60, 61, image, 65], [second], tail)
    assert float((one - other).abs().max()) > 1e-2
    before = [reference.logits([60], [picture], [61, image]) for picture in (first, second)]
    assert torch.equal(before[0], before[1])
    assert len(reference.generate([60, image, 65], [first], 5)) == 5
    assert len(reference.generate([60, 65], [], 5)) == 5
