"""Mistakes that cross-attention (Llama 3.2 Vision) made possible, each with its smallest request."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.core.constraints import AnswerFormat
from fovea.core.media import PixelBudget
from fovea.engine.cache.host import WriteQueue
from fovea.engine.check import check_checkpoint
from fovea.engine.config import EngineConfig
from fovea.engine.layers.layer import CrossLayer
from fovea.engine.layers.linear import Linear
from fovea.engine.load import load_model
from fovea.engine.models.mllama import Mllama
from fovea.engine.profile import ModelRoofline, linears
from fovea.kernels.calibrate import PLAIN
from tests.engine.models.test_parity import assert_same, chat
from tests.engine.models.test_parity import picture as noise
from tests.support.checkpoints import write
from tests.support.engines import SETTINGS, ask, assert_idle, engine, picture, shared_model
from tests.support.reference import Reference

QUESTION = ask("What is in the image?", picture(1))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def test_a_repetition_penalty_leaves_out_the_image_token(crossing: Path) -> None:
    """The image's token is in the prompt, and the head has no row for it."""
    with engine(crossing) as machine:
        plain = machine.generate(QUESTION, **GREEDY).token_ids
        assert machine.generate(QUESTION, **GREEDY, repetition_penalty=1.00001).token_ids == plain
        assert machine.generate(QUESTION, **GREEDY, repetition_penalty=10.0).token_ids != plain
        assert_idle(machine)


def test_the_prompt_of_a_question_about_an_image_is_scored(crossing: Path) -> None:
    """Places of images have no log probability, as for other models."""
    with engine(crossing) as machine:
        done = machine.generate(QUESTION, **GREEDY, prompt_logprobs=2)
        ids = machine.parts.preparer.builder.build(QUESTION).ids
        image = machine.runner.model.image_token_id
        assert image >= machine.info.vocab_size
        entries = list(zip(ids, done.prompt_logprobs, strict=True))
        assert [place for place, (_, entry) in enumerate(entries) if entry is None] == [0, ids.index(image)]
        assert all(entry.id == token for token, entry in entries if entry is not None)
        assert machine.stats()["failed_steps"] == 0
        assert_idle(machine)


def test_answers_about_images_follow_a_format(crossing: Path) -> None:
    """The tokenizer has one token more than the head: the image's. Drafts do not change the answer."""
    form = AnswerFormat("regex", "the red circle is (left|right) of the blue square")
    question = ask("What is it?", picture(1), picture(2))
    answers = set()
    for drafts in (0, 16):
        with engine(crossing, max_draft_tokens=drafts) as machine:
            answers |= set(machine.generate(question, temperature=0, max_tokens=64, format=form).texts)
            assert bool(machine.stats()["accepted_draft_tokens"]) == bool(drafts)
            assert_idle(machine)
    assert len(answers) == 1
    assert re.fullmatch(form.definition, answers.pop())


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two cross layers, one of them the last layer, so that outputs have two tensors."""
    folder = write("mllama", tmp_path_factory.mktemp("deep"))
    config = hf.AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = 5
    config.text_config.cross_attention_layers = [1, 4]
    model = hf.MllamaForConditionalGeneration(config)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random)
        parameter.data = 0.15 * noise + (1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(folder)
    return folder


def test_outputs_of_two_cross_layers_survive_host_memory_and_disk(deep: Path, tmp_path: Path) -> None:
    images = [noise(140, 80, 1), noise(70, 190, 2)]
    question = chat(("user", images, "compare them"))
    base = {**SETTINGS, "prefix_cache": False}
    stored = {**base, "embed_cache_mib": 0, "embed_disk_dir": str(tmp_path)}
    with Engine.from_pretrained(str(deep), **base) as machine:
        assert_same(machine, Reference(deep), question, images)
        expected = machine.generate(question, **GREEDY).token_ids
    with Engine.from_pretrained(str(deep), **stored, embed_host_mib=8) as machine:
        for _ in range(2):
            assert machine.generate(question, **GREEDY).token_ids == expected
            assert machine.parts.slower.flush(10)
        assert machine.stats()["images_encoded"] == 2
        assert_idle(machine)
    with Engine.from_pretrained(str(deep), **stored) as machine:
        assert machine.generate(question, **GREEDY).token_ids == expected
        assert machine.stats()["images_encoded"] == 0


@pytest.mark.parametrize("part", ["k_proj", "v_proj", "k_norm"])
def test_stored_outputs_are_those_of_the_same_cross_layers(part: str, deep: Path, tmp_path: Path) -> None:
    """Encoder outputs are keys and values, so weights of the decoder are in the disk tier's fingerprint."""
    folder = Path(shutil.copytree(deep, tmp_path / "model"))
    settings = EngineConfig.of(**SETTINGS, embed_disk_dir=str(tmp_path / "disk"))
    before = load_model(str(folder), settings).fingerprint
    assert load_model(str(folder), settings).fingerprint == before
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {n: t * 2 for n, t in tensors.items() if f"layers.4.cross_attn.{part}." in n}
        save_file(tensors, file, {"format": "pt"})
    assert load_model(str(folder), settings).fingerprint != before


def test_the_check_accepts_an_image_token_after_the_vocabulary(crossing: Path, tmp_path: Path) -> None:
    report = check_checkpoint(str(crossing))
    assert (report.errors, report.warnings) == ([], [])
    folder = write("mllama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["image_token_index"] = config["text_config"]["vocab_size"] + 8
    (folder / "config.json").write_text(json.dumps(config))
    assert any("image_token_id is" in finding.message for finding in check_checkpoint(str(folder)).errors)


def test_an_output_larger_than_the_queue_of_a_tier_is_stored(crossing: Path) -> None:
    """One image of Llama 3.2 Vision has 200 MiB of keys and values, more than the queue's ceiling."""
    written: dict[str, torch.Tensor] = {}
    queue: WriteQueue[torch.Tensor] = WriteQueue(
        written.__setitem__, lambda: None, name="test", limit=100, every_s=60
    )
    assert queue.submit("large", torch.zeros(1000))
    assert queue.flush(10)
    assert queue.submit("again", torch.zeros(1000))
    queue.close(10)
    assert set(written) == {"large", "again"}


def test_a_step_does_not_count_the_keys_and_values_of_images(crossing: Path) -> None:
    """The maps of cross layers that compute keys and values get rows only while an image is encoded."""
    loaded = shared_model(crossing)
    model, processor = loaded.model, loaded.processor
    assert isinstance(model, Mllama)
    roofline, decoder = ModelRoofline(model), model.decoder
    cross = [cast(CrossLayer, decoder.layers[number]).cross_attn for number in decoder.config.cross_layers]
    images = parameters(layer for mixer in cross for layer in (mixer.k_proj, mixer.v_proj))
    steps = parameters(linears(decoder.layers)) - images
    assert roofline.step(rows=1, keys=0, pairs=0).operations == {PLAIN: 2 * steps}
    plan = processor.plan(96, 64, PixelBudget())
    demand = roofline.image(plan, 1)["projector"]
    assert demand.operations == {PLAIN: 2 * plan.states * (parameters([model.projector]) + images)}


def parameters(maps: Iterable[Linear]) -> int:
    return sum(layer.in_features * layer.out_features for layer in maps)


def test_a_ceiling_that_makes_answers_wait_for_each_other_is_reported(
    crossing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer holds the outputs of its images, so few large images fit by default; nobody was told."""
    with engine(crossing, embed_cache_mib=0):
        assert re.search(
            r"embed_cache_mib is 0: answers about 1 different large images run at a time", caplog.text
        )
    caplog.clear()
    with engine(crossing, embed_cache_mib=64):
        assert "embed_cache_mib" not in caplog.text
