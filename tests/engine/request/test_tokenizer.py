"""The checkpoint's tokenizer turns text into ids, and its template turns messages into text."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.types import ImagePart, Message, TextPart
from fovea.engine.models.tokenizer import _decodes_by_backend, load_tokenizer
from fovea.engine.request.tokenizer import ChatTokenizer
from tests.support.checkpoints import QWEN_TEMPLATE, tokenizer
from tests.support.engines import picture

CONFIG = SimpleNamespace(
    model_type="qwen3_vl", eos_token_id=None, text_config=SimpleNamespace(eos_token_id=2)
)
USER = Message("user", (ImagePart(picture(1)), TextPart("what?")))


@pytest.fixture
def folder(qwen: Path, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(qwen, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.safetensors"))
    )


def load(folder: Path, **options: Any) -> ChatTokenizer:
    return load_tokenizer(folder, options.pop("config", CONFIG), **options)


def chat(template: str | None) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(QWEN_TEMPLATE), template, eos_ids=frozenset({2}))


def test_messages_become_the_models_text(folder: Path) -> None:
    words = load(folder)
    text = words.render([Message("system", (TextPart("be brief"),)), USER])
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert words.decode(words.encode(text), skip_special_tokens=False) == text


def test_another_template_replaces_the_checkpoints_own(folder: Path) -> None:
    words = load(folder, template="{% for m in messages %}{{ m['role'] }};{% endfor %}")
    assert words.render([USER]) == "user;"


def trimming() -> Any:
    """A byte-level tokenizer as Llama 3's: it leaves spaces out of spans, and begins prompts with a token."""
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>"])
    start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), start])
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")


def sentencepiece() -> Any:
    """A tokenizer as Llama 2's: NFKC, and a space before the text, which the text does not have."""
    pieces = [
        ("<unk>", 0.0),
        ("\u2581", -1.0),
        *((chr(code), -5.0) for code in range(33, 127)),
        ("\u2581a", -2.0),
    ]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0))
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.mark.parametrize(
    ("make", "text", "places"),
    [
        (trimming, "a b", [0, 0, 1, 2]),
        (trimming, "\n\U0001f600 x", [0, 0, 1, 1, 1, 1, 2, 3]),
        (trimming, "<s>a", [0, 3]),
        (sentencepiece, "a b", [0, 1, 2]),
        (sentencepiece, "\ufb01 a", [0, 0, 0, 1]),
    ],
)
def test_places_of_a_prompts_tokens(make: Callable[[], Any], text: str, places: list[int]) -> None:
    """They count characters of the text that was sent, whatever the tokenizer changes, adds and leaves out.

    All tokens of one character of that text have its place.
    """
    words = ChatTokenizer(make(), None, eos_ids=frozenset())
    assert words.offsets(words.encode(text), text) == places


def test_places_without_a_text_are_those_in_the_text_of_the_ids() -> None:
    words = ChatTokenizer(sentencepiece(), None, eos_ids=frozenset())
    ids = words.encode("a b")
    assert words.decode(ids) == "a b"
    assert words.offsets(ids, None) == [0, 1, 2]
    assert words.drops_first_space
    assert not ChatTokenizer(trimming(), None, eos_ids=frozenset()).drops_first_space


def test_templates_that_take_text_get_text() -> None:
    """Older templates treat content as a string. They would print a list of parts as Python code."""
    words = chat("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    assert words.render([Message("user", (TextPart("a"), TextPart("b")))]) == "user: ab"
    joining = chat("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert joining.render([Message("user", (TextPart("a"),))]) == "a"


def test_a_template_may_refuse() -> None:
    words = chat(
        "{% for m in messages %}{% if m['role'] == 'tool' %}"
        "{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages: no tools here"):
        words.render([Message("tool", (TextPart("x"),))])


def test_without_a_template_the_error_names_the_alternatives() -> None:
    with pytest.raises(
        InvalidRequest, match="no chat template; use a text prompt, or start with --chat-template"
    ):
        chat(None).render([USER])


def test_a_template_may_be_in_a_file_of_its_own(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        load(folder).render([USER])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load(folder).render([USER]) == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert load(folder).render([USER]) == "from jinja"


def test_llava_has_a_template_even_when_its_checkpoint_has_none(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = SimpleNamespace(**{**vars(CONFIG), "model_type": "llava"})
    text = load(folder, config=config).render([USER])
    assert text == "USER: <image>\nwhat? ASSISTANT:"


@pytest.mark.parametrize(
    ("generation", "model", "text", "expected"),
    [
        ({"eos_token_id": [5, 7]}, 9, 9, {5, 7, 2}),
        ({"eos_token_id": 5}, 9, 9, {5, 2}),
        ({}, 9, 8, {9, 2}),
        (None, None, 8, {8, 2}),
        (None, None, None, {2}),
    ],
    ids=["a list", "one", "the model's", "the decoder's", "the tokenizer's"],
)
def test_every_id_that_ends_an_answer(
    folder: Path, generation: dict[str, Any] | None, model: int | None, text: int | None, expected: set[int]
) -> None:
    path = folder / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    config = SimpleNamespace(
        model_type="qwen3_vl", eos_token_id=model, text_config=SimpleNamespace(eos_token_id=text)
    )
    assert load(folder, config=config).eos_ids == expected


def test_the_start_token_is_added_once() -> None:
    """If the template writes the start token itself, the tokenizer must not add another."""
    raw = tokenizer(QWEN_TEMPLATE)
    raw.bos_token = "<|endoftext|>"
    added: list[bool] = []
    encode = raw.encode

    def watched(text: str, *, add_special_tokens: bool) -> Any:
        added.append(add_special_tokens)
        return encode(text, add_special_tokens=add_special_tokens)

    raw.encode = watched
    words = ChatTokenizer(raw, None, eos_ids=frozenset())
    words.encode("<|endoftext|>hello")
    words.encode("hello")
    assert added == [False, True]


def test_an_unknown_id_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="no token 100000"):
        chat(None).token_text(100_000)


def test_the_shorter_way_to_decode_writes_the_text_of_transformers(folder: Path) -> None:
    """transformers' own way takes eight times as long, mostly to find out that a list is a list."""
    words = load(folder)
    assert words._decodes_by_backend
    dice = random.Random(5)
    for _ in range(200):
        ids = [dice.randrange(words.vocab_size) for _ in range(dice.randrange(9))]
        for skip in (True, False):
            theirs = words._tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert words.decode(ids, skip_special_tokens=skip) == theirs


def test_a_tokenizer_with_a_way_of_its_own_to_decode_keeps_it() -> None:
    raw = tokenizer(QWEN_TEMPLATE)
    assert _decodes_by_backend(raw)

    class Shouting(type(raw)):  # type: ignore[misc]
        def _decode(self, *args: Any, **named: Any) -> str:
            return str(super()._decode(*args, **named)).upper()

    raw.__class__ = Shouting
    assert not _decodes_by_backend(raw)
    words = ChatTokenizer(raw, None, eos_ids=frozenset())
    assert words.decode(words.encode_plain("the red")) == "THE RED"
