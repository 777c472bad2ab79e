"""Sliding windows in the Mistral, Qwen2 and Qwen3 families: answers equal those of transformers, in float32.

The tiny prompts are several times longer than the windows, so an answer changes if a window is ignored.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from fovea import Engine
from fovea.core.errors import UnsupportedModel
from fovea.core.types import ChatPrompt
from fovea.engine.config import EngineConfig
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.load import load_model
from fovea.engine.models.text import decoder_config
from fovea.engine.reduce.probe import run_probe
from fovea.engine.vision.encoding import VisualFeatures
from tests.engine.models.test_parity import TOKENS, assert_same, chat, picture
from tests.support.checkpoints import write
from tests.support.engines import all_at_once, assert_idle
from tests.support.reference import Reference
from tests.support.thorough import is_thorough, others_slow

WINDOW = 12
KINDS = {"full": "full_attention", "sliding": "sliding_attention"}
MIXED = [KINDS["sliding"], KINDS["full"], KINDS["sliding"]]
ALL = {"sliding_window": WINDOW}
LAST = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
SOME = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}
CASES = {
    "pixtral": (ALL, (WINDOW,) * 3),
    "mistral3": (ALL, (WINDOW,) * 3),
    "qwen2_vl": (LAST, (None, WINDOW, WINDOW)),
    "qwen2_5_vl": (SOME, (WINDOW, None, WINDOW)),
    "llava_onevision": (SOME, (WINDOW, None, WINDOW)),
    "lighton_ocr": (LAST, (None, WINDOW, WINDOW)),
}
"""Changes of the text configuration by architecture, and the windows of the layers that follow."""


def with_windows(architecture: str, folder: Path, change: dict[str, Any]) -> Path:
    write(architecture, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    text.pop("layer_types", None)
    text.update(change)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def windows(config: DecoderConfig) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in config.layers)  # type: ignore[union-attr]


def load(folder: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(
        str(folder), **{"dtype": "float32", "kv_cache_mib": 16, "threads": 1, "device": "cpu", **settings}
    )


def logprobs_agree(engine: Engine, reference: Reference, prompt: ChatPrompt, images: list[Any]) -> None:
    done = engine.generate(
        prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, top_logprobs=5
    )
    ids = engine.parts.preparer.builder.build(prompt).ids
    assert len(ids) > 2 * WINDOW
    rows = reference.logits(ids, images, list(done.token_ids[0])).log_softmax(-1)
    for row, entry in zip(rows, done.logprobs[0], strict=True):
        for token, logprob in [(entry.id, entry.logprob), *((id_, value) for id_, _, value in entry.top)]:
            assert float(row[token]) == pytest.approx(logprob, abs=1e-3)


@pytest.mark.parametrize(
    "architecture",
    others_slow(CASES, ["pixtral", "qwen2_vl", "llava_onevision"]),
)
def test_answers_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    change, expected = CASES[architecture]
    folder = with_windows(architecture, tmp_path, change)
    reference = Reference(folder)
    images = [picture(140, 80, 1), picture(70, 190, 2)]
    prompt = chat(("user", images, "compare them"))
    text = chat(("user", [], "the blue square is left of the circle " * 3))
    with load(folder) as engine:
        assert windows(engine.runner.model.decoder.config) == expected
        assert_same(engine, reference, prompt, images)
        assert_same(engine, reference, text, [])
        logprobs_agree(engine, reference, prompt, images)
        plain = load(write(architecture, tmp_path / "plain"))
        with plain:
            answers = [
                machine.generate(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True).token_ids
                for machine in (engine, plain)
            ]
        assert answers[0] != answers[1], "the windows do not matter for this prompt"


@pytest.mark.parametrize("architecture", ["pixtral", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_batches_chunks_and_preemption_change_no_answer(architecture: str, tmp_path: Path) -> None:
    """Pixtral's decoder has windows in all layers, so the blocks of layers without one have no layers."""
    folder = with_windows(architecture, tmp_path, CASES[architecture][0])
    prompts = [chat(("user", [picture(100, 60, n)], "the red circle?")) for n in range(4)]

    def answer(engine: Engine, prompt: ChatPrompt) -> tuple[int, ...]:
        return engine.generate(prompt, temperature=0, max_tokens=16, ignore_eos=True).token_ids[0]

    with load(folder, prefix_cache=False, max_running=1) as alone:
        truth = [answer(alone, prompt) for prompt in prompts] * 2
        longest = max(len(alone.parts.preparer.builder.build(prompt).ids) for prompt in prompts)
    assert len(set(truth)) == len(prompts)
    small = {"block_size": 4, "kv_blocks": longest // 2 + 4, "max_step_tokens": 13, "kv_cache_mib": 0}
    for settings in ({}, small):
        with load(folder, **settings) as engine:
            for _ in range(2 if is_thorough() or not settings else 1):
                with ThreadPoolExecutor(8) as pool, all_at_once(engine, 8):
                    assert list(pool.map(lambda prompt: answer(engine, prompt), prompts * 2)) == truth
            assert engine.stats()["preemptions"] > 0 or not settings
            assert_idle(engine)


def test_a_probe_sees_what_the_windows_show(tmp_path: Path) -> None:
    """Tokens before the window of the last row have no score, and the states are those of the decoder."""
    folder = with_windows("llava_onevision", tmp_path, SOME)
    model = load_model(str(folder), EngineConfig.of(dtype="float32", device="cpu")).model
    visual = VisualFeatures(torch.randn(16, 64, generator=torch.Generator().manual_seed(3)))
    before, after = [5, 6, 7], [40, 41, 42, 43]
    one, all_layers = (run_probe(model, before, visual, after, (4, 4), layers=n) for n in (1, 3))
    hidden = 16 + len(after) - WINDOW
    assert not one.scores[:hidden].any()
    assert (one.scores[hidden:] > 0).all()
    table = model.decoder.embed_tokens
    x = torch.cat([table(torch.tensor(before)), visual.embeds, table(torch.tensor(after))])
    theirs = Reference(folder).model.model.language_model(inputs_embeds=x[None]).last_hidden_state[0]
    torch.testing.assert_close(all_layers.hidden, theirs, atol=1e-4, rtol=1e-4)


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    text = hf.MistralConfig(sliding_window=512, max_position_embeddings=512, num_hidden_layers=2)
    assert windows(decoder_config(text, tied=False)) == (None, None)
    text.sliding_window = 511
    assert windows(decoder_config(text, tied=False)) == (511, 511)


def test_qwens_windows_need_their_switch() -> None:
    text = hf.Qwen2Config(sliding_window=64, max_window_layers=1, num_hidden_layers=3)
    assert windows(decoder_config(text, tied=False)) == (None,) * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (hf.Qwen2Config(num_hidden_layers=3, layer_types=MIXED),
         "sliding_window None; supported: 3 layers of full_attention"),
        (hf.Qwen2Config(num_hidden_layers=3, layer_types=MIXED, use_sliding_window=True, sliding_window=0),
         "sliding_window is 0; supported: an integer of 1 or more"),
        (hf.LlamaConfig(num_hidden_layers=3, layer_types=MIXED), "supported: 3 layers of full_attention"),
        (hf.MistralConfig(num_hidden_layers=3, sliding_window=8, layer_types=MIXED),
         "supported: 3 layers of sliding_attention"),
        (hf.MistralConfig(num_hidden_layers=3, sliding_window=None, layer_types=MIXED),
         "supported: 3 layers of full_attention"),
    ],
    ids=["qwen without a window", "no tokens", "llama", "mistral, some layers", "mistral without a window"],
)  # fmt: skip
def test_refused_windows(text: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        decoder_config(text, tied=False)


def test_two_different_windows_are_refused() -> None:
    config = decoder_config(hf.MistralConfig(sliding_window=8, num_hidden_layers=2), tied=False)
    first, last = config.layers
    mixed = replace(config, layers=(first, replace(last, mixer=replace(last.mixer, window=9))))
    with pytest.raises(UnsupportedModel, match=r"window 8, .*window 9; supported: one kind without a window"):
        _ = mixed.kv_groups
