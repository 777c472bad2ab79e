"""Gemma 4 in the forms of its published sizes: answers equal those of transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from tests.engine.models.test_parity import TOKENS, assert_same, chat, picture
from tests.support.checkpoints import write_gemma4
from tests.support.reference import Reference

LARGE = {
    "use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "31B": LARGE,
    "26B-A4B": {
        **LARGE, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
    },
}  # fmt: skip
"""Settings that differ from those of E2B, by published size."""


@pytest.fixture(scope="module", params=SIZES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Reference]]:
    folder = write_gemma4(tmp_path_factory.mktemp(request.param), **SIZES[request.param])
    with Engine.from_pretrained(
        str(folder), dtype="float32", kv_cache_mib=16, threads=1, max_step_tokens=32
    ) as engine:
        yield engine, Reference(Path(folder))


def test_an_image_of_more_tokens_than_the_window(pair: tuple[Engine, Reference]) -> None:
    """Its tokens see each other, but not beyond the window; layers without one see what is before only."""
    engine, reference = pair
    image = picture(231, 190)
    prompt = chat(("user", [image], "what is it?"))
    ids = engine.parts.preparer.builder.build(prompt).ids
    assert list(ids).count(reference.image_token) > 24
    assert_same(engine, reference, prompt, [image])


def test_two_images_in_chunks(pair: tuple[Engine, Reference]) -> None:
    images = [picture(140, 80, 1), picture(70, 190, 2)]
    assert_same(*pair, chat(("user", images, "compare them")), images)


def test_log_probabilities_agree(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    image = picture(120, 75, 5)
    prompt = chat(("user", [image], "Describe the picture, please."))
    ids = engine.parts.preparer.builder.build(prompt).ids
    done = engine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True)
    rows = reference.logits(ids, [image], list(done.token_ids[0])).log_softmax(-1)
    for row, entry in zip(rows, done.logprobs[0], strict=True):
        assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=1e-3)


def test_layers_without_own_keys_compute_only_rows_that_are_read(tmp_path: Path) -> None:
    """These are the last row of a prompt, and no row of a part of a prompt that others follow."""
    config = EngineConfig.of(dtype="float32", kv_cache_mib=16, threads=1, max_step_tokens=16)
    loaded = load_model(str(write_gemma4(tmp_path)), config)
    rows: list[list[int]] = [[], []]
    for counts, layer in zip(
        rows, (loaded.model.decoder.layers[2], loaded.model.decoder.layers[3]), strict=True
    ):
        layer.register_forward_pre_hook(lambda _, args, counts=counts: counts.append(len(args[0])))
    with Engine(loaded, config) as engine:
        prompt = chat(("user", [], "the red circle is left of the blue square " * 3))
        length = len(engine.parts.preparer.builder.build(prompt).ids)
        engine.generate(prompt, temperature=0, max_tokens=3, ignore_eos=True)
    assert length > 2 * 16
    assert sum(rows[0]) == length + 2
    assert rows[1] == [1, 1, 1]
