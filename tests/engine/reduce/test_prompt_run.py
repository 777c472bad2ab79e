"""Runs of prompts through the first layers: equal to the attention of transformers, alone and together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from fovea import Engine
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.reduce.look import TWICE, beyond_usual, look, usual_heads
from fovea.engine.reduce.prompt_run import BLOCK, PromptRun
from fovea.engine.vision.encoding import VisualFeatures, run_to_end
from fovea.engine.vision.processor.base import LookPrompt
from tests.support.checkpoints import write
from tests.support.engines import ask, engine, picture
from tests.support.reduced import GREEDY, tokens_of
from tests.support.thorough import others_slow

GRID = (3, 4)
COUNT = 12
BEFORE = tuple(range(5, 5 + 9))
ENDS = ((40, 41, 42, 43, 44), (50, 51, 52))
"""A question, and a neutral request. They share the first block, but not the rest of the image."""
MODELS = {
    "qwen3_vl": "M-RoPE, DeepStack and norms of queries and keys",
    "qwen2_5_vl": "M-RoPE alone",
    "llava": "one-dimensional positions",
    "gemma3": "sliding windows that are shorter than the prompt",
    "qwen3_5": "states in most layers, and gates",
}


@pytest.fixture(scope="module", params=others_slow(MODELS, ["qwen3_vl", "gemma3", "qwen3_5"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> VisionLanguageModel:
    return load_model(str(folder), EngineConfig.of(dtype="float32", kernels="torch", device="cpu")).model


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return hf.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def features(model: VisionLanguageModel, places: Tensor | None = None, seed: int = 0) -> VisualFeatures:
    """Random features, of all tokens or of those at `places`."""
    count = COUNT if places is None else len(places)
    random, width = torch.Generator().manual_seed(seed), model.decoder.config.hidden
    rows = [torch.randn(count, width, generator=random) for _ in range(3)]
    levels = getattr(getattr(model, "vision", None), "config", None)
    deepstack = rows[1:] if getattr(levels, "deepstack", ()) else ()
    return VisualFeatures(rows[0], tuple(deepstack), places=places)


def positions(
    model: VisionLanguageModel, places: Tensor | None, grid: tuple[int, int], length: int
) -> Tensor:
    """The positions of a prompt's tokens, by their definition: (3, length) with M-RoPE, else (length,)."""
    if model.merge is None:
        return torch.arange(length)
    cells = torch.tensor([divmod(number, grid[1]) for number in range(COUNT)]) if places is None else places
    columns = [(at, at, at) for at in range(len(BEFORE))]
    columns += [(len(BEFORE), len(BEFORE) + row, len(BEFORE) + column) for row, column in cells.tolist()]
    after = len(BEFORE) + max(grid)
    columns += [(after + at,) * 3 for at in range(length - len(columns))]
    return torch.tensor(columns).T


@torch.inference_mode()
def their_attention(
    theirs: Any,
    model: VisionLanguageModel,
    visual: VisualFeatures,
    end: tuple[int, ...],
    grid: tuple[int, int],
) -> list[Tensor]:
    """For each layer with attention the last row's attention to the image, (heads, tokens)."""
    ids = torch.tensor([*BEFORE, *[0] * len(visual.embeds), *end])
    image = slice(len(BEFORE), len(BEFORE) + len(visual.embeds))
    embeds = theirs.get_input_embeddings()(ids)
    embeds[image] = visual.embeds
    extra: dict[str, Any] = {}
    if visual.deepstack:
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, image] = True
        extra = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(visual.deepstack)}
    where = positions(model, visual.places, grid, len(ids))
    output = theirs.model.language_model(
        inputs_embeds=embeds[None],
        attention_mask=torch.ones_like(ids)[None],
        position_ids=where[:, None] if where.ndim == 2 else where[None],
        use_cache=False,
        output_attentions=True,
        **extra,
    )
    return [layer[0, :, -1, image] for layer in output.attentions if layer is not None]


def assert_equal_attention(
    theirs: Any, model: VisionLanguageModel, visual: VisualFeatures, grid: tuple[int, int]
) -> None:
    expected = [their_attention(theirs, model, visual, end, grid) for end in ENDS]
    layers = sorted({layer for layer, _ in model.decoder.config.look_heads})
    assert len(layers) == len(expected[0])
    with torch.inference_mode():
        run = PromptRun(model, BEFORE, visual, ENDS, grid)
        for number, layer in enumerate(layers):
            run.run(layer)
            for prompt, attention in enumerate(run.attention(layer)):
                torch.testing.assert_close(attention, expected[prompt][number], atol=1e-5, rtol=1e-4)


def test_attention_is_that_of_transformers_in_every_layer(model: VisionLanguageModel, theirs: Any) -> None:
    assert len(BEFORE) + COUNT > BLOCK, "the prompts share a block"
    assert_equal_attention(theirs, model, features(model), GRID)


def test_some_tokens_of_an_image_attend_from_their_true_places(
    model: VisionLanguageModel, theirs: Any
) -> None:
    if model.merge is None:
        pytest.skip("without M-RoPE, tokens have no places")
    places = torch.tensor([[0, 0], [0, 6], [2, 1], [4, 5], [4, 6]], dtype=torch.int32)
    assert_equal_attention(theirs, model, features(model, places), (5, 7))


@torch.inference_mode()
def test_a_prompt_does_not_depend_on_those_that_share_the_run(model: VisionLanguageModel) -> None:
    visual, last = features(model), model.decoder.config.look_heads[-1][0]
    alone = []
    for end in ENDS:
        run = PromptRun(model, BEFORE, visual, (end,), GRID)
        run.run(last)
        alone += run.attention(last)
    for ends in (ENDS, (*ENDS, (60,) * 20), ENDS[::-1]):
        run = PromptRun(model, BEFORE, visual, ends, GRID)
        run.run(last)
        for end, attention in zip(ends, run.attention(last), strict=True):
            if end in ENDS:
                torch.testing.assert_close(attention, alone[ENDS.index(end)], atol=1e-6, rtol=1e-4)


@torch.inference_mode()
def test_a_long_beginning_and_none_give_the_same_as_one_prompt_each(model: VisionLanguageModel) -> None:
    """Blocks of the beginning are shared; without one, the image begins the prompt."""
    visual, last = features(model), model.decoder.config.look_heads[-1][0]
    for before in ((), tuple(range(5, 5 + 2 * BLOCK - COUNT)), tuple(range(5, 5 + 3 * BLOCK))):
        both = PromptRun(model, before, visual, ENDS, GRID)
        both.run(last)
        for end, attention in zip(ENDS, both.attention(last), strict=True):
            one = PromptRun(model, before, visual, (end,), GRID)
            one.run(last)
            torch.testing.assert_close(attention, one.attention(last)[0], atol=1e-6, rtol=1e-4)


@torch.inference_mode()
def test_layers_that_ran_do_not_run_again(model: VisionLanguageModel) -> None:
    visual, last = features(model), model.decoder.config.look_heads[-1][0]
    once, stepwise = (PromptRun(model, BEFORE, visual, ENDS, GRID) for _ in range(2))
    once.run(last)
    for layers in (1, 1, last, 0, last):
        stepwise.run(min(layers, last))
    assert stepwise.done == once.done == last
    assert torch.equal(stepwise.x, once.x)


def looked(model: VisionLanguageModel, prompt: LookPrompt, heads: Any) -> Tensor:
    with torch.inference_mode():
        return run_to_end(look(model, prompt, features(model), GRID, heads))


def test_a_look_is_the_mean_of_its_heads_beyond_the_neutral_request(
    model: VisionLanguageModel, theirs: Any
) -> None:
    """With transformers' attention, head by head."""
    known = model.decoder.config.look_heads
    heads = (known[0], known[-2], known[-1])
    layers = sorted({layer for layer, _ in known})
    asked, neutral = (their_attention(theirs, model, features(model), end, GRID) for end in ENDS)
    expected = torch.zeros(COUNT)
    for layer, head in heads:
        for token in range(COUNT):
            ours, usual = (float(table[layers.index(layer)][head, token]) for table in (asked, neutral))
            expected[token] += ours * min(1.0, ours / max(TWICE * usual, 1e-9)) / len(heads)
    result = looked(model, LookPrompt(BEFORE, *ENDS), heads)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-3)
    assert result.dtype == torch.float32


def test_the_same_look_gives_the_same_bits(model: VisionLanguageModel) -> None:
    prompt, heads = LookPrompt(BEFORE, *ENDS), usual_heads(model.decoder.config)
    assert torch.equal(looked(model, prompt, heads), looked(model, prompt, heads))


def test_a_question_that_asks_nothing_special_halves_the_attention(model: VisionLanguageModel) -> None:
    heads = usual_heads(model.decoder.config)
    result = looked(model, LookPrompt(BEFORE, ENDS[0], ENDS[0]), heads)
    with torch.inference_mode():
        run = PromptRun(model, BEFORE, features(model), (ENDS[0],), GRID)
        expected = []
        for layer, head in heads:
            run.run(layer)
            expected.append(run.attention(layer)[0][head])
    torch.testing.assert_close(result, torch.stack(expected).mean(0) / 2, atol=1e-6, rtol=1e-4)


def test_attention_beyond_the_usual_by_hand() -> None:
    """Twice the usual counts fully, as much as usual by half, and half of the usual by a quarter."""
    asked = torch.tensor([[0.4, 0.2, 0.1, 0.3, 0.0]])
    neutral = torch.tensor([[0.2, 0.2, 0.2, 0.0, 0.0]])
    expected = torch.tensor([[0.4, 0.1, 0.025, 0.3, 0.0]])
    torch.testing.assert_close(beyond_usual(asked, neutral), expected)


def test_usual_heads_are_those_of_the_middle_layers(model: VisionLanguageModel) -> None:
    config = model.decoder.config
    depth = len(config.layers)
    expected = [head for head in config.look_heads if 0.5 * depth <= head[0] < 0.8 * depth]
    assert usual_heads(config) == tuple(expected or config.look_heads)
    first = replace(config, layers=config.layers[-1:])
    if first.look_heads:
        assert usual_heads(first) == first.look_heads, "with one layer, that one"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(write("qwen3_vl", tmp_path_factory.mktemp("engine"))) as machine:
        yield machine


def test_a_run_leaves_the_kv_of_the_engine_as_it_is(machine: Engine) -> None:
    prompt = ask("what is it?", picture(21, 190, 130))
    answer = tokens_of(machine.generate(prompt, **GREEDY))
    pools = machine.runner.memory.kv
    before = [pool.kv.clone() for pool in pools]
    used = machine.stats()["kv_blocks_used"]
    looked(machine.runner.model, LookPrompt(BEFORE, *ENDS), usual_heads(machine.runner.model.decoder.config))
    assert all(torch.equal(pool.kv, kept) for pool, kept in zip(pools, before, strict=True))
    assert machine.stats()["kv_blocks_used"] == used
    assert tokens_of(machine.generate(prompt, **GREEDY)) == answer
