"""Models for text alone: they answer as transformers does, and refuse images by name, however they come."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf
from PIL import Image

from fovea import Engine
from fovea.cli.main import main
from fovea.cli.plan.inputs import find_model
from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.types import Message, TextPart
from fovea.engine.check import check_checkpoint
from fovea.engine.load import load_tokenizer, read_config
from fovea.engine.models.registry import ARCHITECTURES
from fovea.engine.request.inputs import to_prompt
from tests.support.checkpoints.text import TEXT_MODELS, write_text

QUESTION = "the blue square is left of the red circle, and the green one is right of it?"
TOKENS = 12
PICTURE = Image.new("RGB", (60, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(llama), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        yield engine


def test_every_architecture_is_compared() -> None:
    assert {entry.model_type for entry in ARCHITECTURES if not entry.images} == set(TEXT_MODELS)


@pytest.mark.parametrize("kind", TEXT_MODELS)
@torch.inference_mode()
def test_tokens_and_log_probabilities_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Every chosen token is the best of transformers, too. Log-probabilities agree, the prompt's, too."""
    folder = write_text(kind, tmp_path)
    reference = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Engine.from_pretrained(str(folder), dtype="float32", kv_cache_mib=16, threads=1) as engine:
        prompt = engine.outline(to_prompt(QUESTION)).ids
        answer = engine.generate(
            QUESTION, temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, prompt_logprobs=0
        )
    assert len(prompt) > 40, "longer than every window"
    rows = reference(torch.tensor([[*prompt, *answer.token_ids[0]]])).logits[0].log_softmax(-1)
    known = [*answer.prompt_logprobs[1:], *answer.logprobs[0]]
    for row, entry in zip(rows, known, strict=False):
        assert entry is not None
        assert entry.logprob is not None
        assert float(row[entry.id]) == pytest.approx(entry.logprob, abs=1e-3)
    for row, entry in zip(rows[len(prompt) - 1 : -1], answer.logprobs[0], strict=True):
        assert float(row.max() - row[entry.id]) < 1e-4


def test_a_python_caller_is_told_which_part_is_an_image(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: this is an image, and"):
        engine.generate("what is it?", [PICTURE])
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": PICTURE}]},
    ]
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(messages)
    assert caught.value.param == "messages[1].content[1]"
    assert caught.value.code == "image_not_supported"


def test_a_method_for_visual_tokens_is_refused_when_the_engine_starts(llama: Path) -> None:
    with pytest.raises(ConfigError, match="visual_tokens: this model takes no images"):
        Engine.from_pretrained(str(llama), dtype="float32", kv_cache_mib=16, visual_tokens="fastv:0.5")


def test_the_check_of_a_checkpoint_needs_no_image_processor(llama: Path) -> None:
    report = check_checkpoint(str(llama))
    assert not report.errors
    assert not report.warnings
    assert not report.unchecked
    assert report.facts["architecture"] == "Llama, SmolLM2"
    assert report.facts["images"] is False
    assert report.facts["tensors"] == 2 + 9 * 3


def test_a_plan_has_no_encoder_and_refuses_images(llama: Path, engine: Engine) -> None:
    model = find_model(str(llama))
    assert model.shape.parameters == engine.info.parameters
    assert not model.shape.takes_images
    assert set(model.shape.maps) == {"decoder", "head"}
    with pytest.raises(ConfigError, match="the workload has an image of 640x360 pixels, and .* text alone"):
        model.count(640, 360)
    with pytest.raises(ConfigError, match="takes text alone; --visual-tokens is for models with images"):
        find_model(str(llama), visual_tokens=64)


def test_generated_scenes_are_refused_before_any_is_asked_and_own_questions_work(
    llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["eval", str(llama), "--count", "1", "--threads", "1"]) == 2
    assert "has an image, and the model" in capsys.readouterr().err
    (tmp_path / "own.jsonl").write_text('{"question": "hi", "answer": "hi"}')
    words = ["eval", str(llama), "--data", str(tmp_path / "own.jsonl"), "--max-tokens", "2", "--json"]
    assert main([*words, "--threads", "1"]) == 0
    assert '"failed": 0' in capsys.readouterr().out


def test_ask_and_chat_name_the_file_that_is_an_image(
    llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat goes on without it: an image that stayed would be refused with every later message."""
    picture = tmp_path / "page.png"
    PICTURE.save(picture)
    options = ["--model", str(llama), "--max-tokens", "2", "--threads", "1", "--temperature", "0"]
    assert main(["ask", *options, str(picture), "what is it?"]) == 2
    assert f"fovea: {picture}: this is an image, and the model llama" in capsys.readouterr().err
    lines = iter([f"/image {picture}", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert main(["chat", *options]) == 0
    written = capsys.readouterr()
    assert f"fovea: {picture}: this is an image, and the model llama" in written.err
    assert written.err.count("takes text alone") == 1
    assert written.out.strip()


@pytest.mark.slow  # it measures the machine, which takes seconds
def test_a_profile_has_no_image_unless_one_is_named(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", str(llama), "--tokens", "2", "--repeats", "1", "--requests", "0", "--threads", "1"]
    assert main(words) == 0
    assert "prefill" in capsys.readouterr().out


def test_a_template_that_takes_text_is_loaded_without_a_warning(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such templates fail when they are tried with a list of parts. SmolLM2's is one of them."""
    shutil.copytree(llama, tmp_path / "copy")
    template = "{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}"
    (tmp_path / "copy/chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path / "copy", read_config(llama))
    assert tokenizer.render((Message("user", (TextPart("a"), TextPart("b"))),)) == "<|im_start|>ab"
    assert not caplog.records
