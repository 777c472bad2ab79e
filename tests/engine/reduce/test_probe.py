"""A probe returns what the decoder computes, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fovea.core.errors import EngineError
from fovea.engine.config import EngineConfig
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.step import DecoderMemory, DecoderPlan
from fovea.engine.load import load_model
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.reduce.base import ReductionInput
from fovea.engine.reduce.methods import reducer
from fovea.engine.reduce.probe import run_probe
from fovea.engine.sequence import ImageSpan
from fovea.engine.step.positions import mrope_positions
from fovea.engine.vision.encoding import VisualFeatures
from fovea.kernels.attention import AttentionPlan, Chunk
from fovea.kernels.reference import rotate
from tests.support.checkpoints import write
from tests.support.programs import need_kernels

pytestmark = pytest.mark.kernels

GRID, BEFORE, AFTER = (3, 4), [5, 6, 7], [40, 41, 42, 43, 44]
LENGTH = len(BEFORE) + 12 + len(AFTER)
IMAGE = slice(len(BEFORE), len(BEFORE) + 12)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_vl", "llava"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionLanguageModel:
    """Models with M-RoPE, DeepStack and key norms; with M-RoPE alone; and with one-dimensional positions."""
    folder = write(request.param, tmp_path_factory.mktemp(request.param))
    return load(folder, "float32")


def load(folder: Path, dtype: str, kernels: str = "torch") -> VisionLanguageModel:
    return load_model(str(folder), EngineConfig.of(dtype=dtype, kernels=kernels, device="cpu")).model


def features(model: VisionLanguageModel, seed: int = 0) -> VisualFeatures:
    random, width = torch.Generator().manual_seed(seed), model.decoder.config.hidden
    rows = [torch.randn(12, width, generator=random).to(model.dtype) for _ in range(3)]
    return VisualFeatures(rows[0], tuple(rows[1:]) if hasattr(model, "vision") and deepstack(model) else ())


def deepstack(model: VisionLanguageModel) -> bool:
    return bool(getattr(model.vision.config, "deepstack", ()))


def positions(model: VisionLanguageModel) -> Tensor:
    if model.merge is None:
        return torch.arange(LENGTH)
    span = ImageSpan(0, len(BEFORE), 12, 12, "", (1, 2 * GRID[0], 2 * GRID[1]))
    return torch.from_numpy(mrope_positions(LENGTH, [span], 2)[0])


def inputs(model: VisionLanguageModel, visual: VisualFeatures) -> Tensor:
    table = model.decoder.embed_tokens
    return torch.cat((table(torch.tensor(BEFORE)), visual.embeds, table(torch.tensor(AFTER))))


def run(decoder: Decoder, x: Tensor, places: Tensor, visual: VisualFeatures) -> tuple[Tensor, Tensor]:
    """Run all layers as the runner does, and return the hidden states and the KV."""
    memory = DecoderMemory.allocate(decoder.config, (1,), LENGTH, 0, torch.float32, torch.device("cpu"))
    plan = AttentionPlan(torch.arange(LENGTH), (), (Chunk(0, LENGTH, 0, torch.zeros(1, dtype=torch.long)),))
    rows = torch.arange(IMAGE.start, IMAGE.stop)
    return decoder(x, places, memory, DecoderPlan((plan,)), rows, visual.deepstack), memory.kv[0].kv


@torch.inference_mode()
def test_a_probe_of_all_layers_is_the_decoder(model: VisionLanguageModel) -> None:
    visual, decoder = features(model), model.decoder
    hidden, kv = run(decoder, inputs(model, visual), positions(model), visual)
    probe = run_probe(model, BEFORE, visual, AFTER, GRID, layers=len(decoder.layers))
    torch.testing.assert_close(probe.hidden, decoder.norm(hidden))
    torch.testing.assert_close(probe.keys, kv[-1].flatten(0, 1)[:, 0])
    assert probe.start == IMAGE.start


@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_scores_are_the_last_rows_attention(model: VisionLanguageModel, layers: int) -> None:
    visual, decoder = features(model), model.decoder
    probe = run_probe(model, BEFORE, visual, AFTER, GRID, layers=layers)
    entering = inputs(model, visual)
    if layers > 1:
        entering = states_after(model, visual, layers - 1)
    layer = decoder.layers[layers - 1]
    attention, heads = layer.self_attn, decoder.config.attention_heads.query
    query = layer.before(entering).view(LENGTH, -1, attention.dim)[:, :heads]
    if attention.q_norm is not None:
        query = attention.q_norm(query)
    query = rotate(query, *decoder.angles(positions(model), torch.float32)[0])[-1]
    weights = torch.zeros(LENGTH)
    for head in range(heads):
        keys = probe.keys[:, head * attention.kv_heads // heads]
        weights += (keys @ query[head] / attention.dim**0.5).softmax(0) / heads
    torch.testing.assert_close(probe.scores, weights[IMAGE])


def states_after(model: VisionLanguageModel, visual: VisualFeatures, layers: int) -> Tensor:
    """Hidden states after some layers, without the last norm, from a decoder that has only these layers."""
    decoder = model.decoder
    all_layers, decoder.layers = decoder.layers, decoder.layers[:layers]
    try:
        short = VisualFeatures(visual.embeds, visual.deepstack[:layers])
        return run(decoder, inputs(model, short), positions(model), short)[0]
    finally:
        decoder.layers = all_layers


def test_fastv_finds_the_token_that_the_question_is_about(model: VisionLanguageModel) -> None:
    """One visual token is changed until its key fits the last row's query. It must get the highest score."""
    visual = features(model)
    plain = run_probe(model, BEFORE, visual, AFTER, GRID, layers=1)
    target, embeds = 7, visual.embeds.clone()
    with torch.enable_grad():
        row = embeds[target].clone().requires_grad_()
        for _ in range(20):
            layer = model.decoder.layers[0]
            changed = torch.cat((embeds[:target], row[None], embeds[target + 1 :]))
            x = inputs(model, VisualFeatures(changed))
            attention, heads = layer.self_attn, model.decoder.config.attention_heads.query
            qkv = layer.before(x).view(LENGTH, -1, attention.dim)
            query, key = qkv[:, :heads], qkv[:, heads : heads + attention.kv_heads]
            if attention.q_norm is not None:
                query, key = attention.q_norm(query), attention.k_norm(key)
            (angles,) = model.decoder.angles(positions(model), torch.float32)
            query, key = rotate(query, *angles)[-1], rotate(key, *angles)[IMAGE.start + target]
            products = torch.einsum("hgd,hd->", query.view(attention.kv_heads, -1, attention.dim), key)
            (slope,) = torch.autograd.grad(products, row)
            row = (row + slope / slope.norm()).detach().requires_grad_()
    embeds[target] = row.detach()
    probe = run_probe(model, BEFORE, VisualFeatures(embeds, visual.deepstack), AFTER, GRID, layers=1)
    assert probe.scores[target] > plain.scores[target]
    image = ReductionInput(embeds, GRID, "", probe=probe)
    assert reducer("fastv").reduce(image, 1).index.tolist() == [target]


def test_the_native_kernels_give_the_same_probe(tmp_path: Path) -> None:
    need_kernels()
    folder = write("qwen3_vl", tmp_path)
    ours, torchs = load(folder, "bfloat16", "native"), load(folder, "bfloat16")
    visual = features(ours)
    one, other = (run_probe(model, BEFORE, visual, AFTER, GRID) for model in (ours, torchs))
    torch.testing.assert_close(one.scores, other.scores, atol=0.02, rtol=0.1)
    assert torch.cosine_similarity(one.hidden.float(), other.hidden.float()).min() > 0.999


def test_a_probe_refuses_impossible_arguments(model: VisionLanguageModel) -> None:
    visual = features(model)
    with pytest.raises(EngineError, match="2 of 3 layers with 0 tokens after"):
        run_probe(model, BEFORE, visual, [], GRID)
    for layers in (0, 4):
        with pytest.raises(EngineError, match=f"{layers} of 3 layers"):
            run_probe(model, BEFORE, visual, AFTER, GRID, layers=layers)


def test_an_image_may_begin_the_prompt(model: VisionLanguageModel) -> None:
    probe = run_probe(model, [], features(model), AFTER, GRID)
    assert probe.start == 0
    assert probe.hidden.shape[0] == 12 + len(AFTER)
