"""Tokenizers from the metadata of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.models.gguf.checkpoint import find_gguf
from fovea.engine.models.gguf.reader import GgufFile
from fovea.engine.models.gguf.tokenizer import SPLITTERS, build_tokenizer, end_ids
from tests.fuzz.targets.gguf import model as tiny_file
from tests.support.checkpoints.text import write_text
from tests.support.gguf_files import write_model

TEXTS = (
    "What is in the image? Describe the picture, please.",
    "  two  spaces\n\n and\tlines \n",
    "it's 1,234,567.89 \u20ac: caf\u00e9, \u6f22\u5b57 \U0001f600",
    "<|im_start|>user\nhello<|im_end|> <|im_end",
    "",
)
SPACE = "\u2581"


def file_with(folder: Path, **changes: Any) -> GgufFile:
    """A file whose tokenizer.ggml entries differ from the tiny model's."""
    path = folder / "model.gguf"
    path.write_bytes(tiny_file({f"tokenizer.ggml.{name}": entry for name, entry in changes.items()}))
    return GgufFile(path)


def test_a_byte_level_tokenizer_is_that_of_its_folder(tmp_path: Path) -> None:
    folder = write_text("qwen2", tmp_path / "folder")
    path = write_model(folder, tmp_path / "model.gguf")
    theirs, ours = hf.AutoTokenizer.from_pretrained(folder), build_tokenizer(GgufFile(path))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_id == theirs.eos_token_id
    ends = {
        ours.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>", "<end_of_utterance>")
    }
    assert end_ids(GgufFile(path)) == ends, "those that end answers in any vocabulary"
    checkpoint = find_gguf(path)
    assert checkpoint is not None
    chat = checkpoint.tokenizer(checkpoint.config())
    assert chat.has_template
    assert chat.eos_ids == ends


@pytest.mark.parametrize("name", SPLITTERS)
def test_every_way_to_split_text_keeps_it_whole(name: str, tmp_path: Path) -> None:
    """Without merges all tokens are bytes, so that text that the patterns lost would be missing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    file = file_with(
        tmp_path,
        model=("str", "gpt2"),
        pre=("str", name),
        tokens=("[str]", alphabet),
        token_type=("[i32]", [1] * 256),
        merges=("[str]", ()),
        scores=None,
        bos_token_id=None,
        unknown_token_id=None,
        eos_token_id=None,
    )
    tokenizer = build_tokenizer(file)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_digits_are_split_as_each_vocabulary_wants(tmp_path: Path) -> None:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["1234567"] * 9, trainer)
    words = sorted(raw.get_vocab().items(), key=lambda item: item[1])
    merges = [f"{'1234567'[:n]} {'1234567'[n]}" for n in range(1, 7)]
    tokens = [word for word, _ in words if len(word) == 1] + ["1234567"[: n + 1] for n in range(1, 7)]
    for name, count in (("gpt-2", 1), ("llama-bpe", 3), ("qwen2", 7), ("smollm", 7)):
        file = file_with(
            tmp_path, model=("str", "gpt2"), pre=("str", name), tokens=("[str]", tokens),
            token_type=("[i32]", [1] * len(tokens)), merges=("[str]", merges), scores=None,
            bos_token_id=None, eos_token_id=None, unknown_token_id=None,
        )  # fmt: skip
        assert len(build_tokenizer(file).encode("1234567", add_special_tokens=False)) >= count
        if name == "gpt-2":
            assert build_tokenizer(file).encode("1234567") == [tokens.index("1234567")]
        if name == "llama-bpe":
            first = build_tokenizer(file).encode("1234567", add_special_tokens=False)[0]
            assert first == tokens.index("123")


PIECES = {
    SPACE: -9.0, "h": -20.0, "e": -20.0, "l": -20.0, "o": -20.0, "he": -1.0, "el": -0.5, "ll": -3.0,
    "lo": -2.0, "hel": -2.5, "llo": -4.0, f"{SPACE}he": -1.5, "hello": -5.0, f"{SPACE}hello": -6.0,
    "ell": -3.5,
}  # fmt: skip
MARKS = ("<unk>", "<s>", "</s>", "<mark>", *(f"<0x{byte:02X}>" for byte in range(256)))


def sentencepiece(folder: Path, **changes: Any) -> GgufFile:
    tokens = [*MARKS, *PIECES]
    kinds = [2, 3, 3, 4, *[6] * 256, *[1] * len(PIECES)]
    scores = [*[0.0] * len(MARKS), *PIECES.values()]
    return file_with(
        folder,
        tokens=("[str]", tokens),
        token_type=("[i32]", kinds),
        scores=("[f32]", scores),
        **changes,
    )


def by_score(text: str) -> list[str]:
    """Merge the neighbours with the highest score, the leftmost of equal ones, until none makes a token."""
    pieces = list(text)
    while True:
        pairs = [
            (-PIECES[left + right], at)
            for at, (left, right) in enumerate(zip(pieces, pieces[1:], strict=False))
            if left + right in PIECES
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(sentencepiece(tmp_path))
    for text in ("hello", "hello hello", "heello", "lolo hell", "olleh"):
        expected = by_score(f"{SPACE}{text}".replace(" ", SPACE))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)) == expected
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_sentencepiece_has_bytes_marks_and_a_first_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(sentencepiece(tmp_path))
    assert tokenizer.encode("hello")[0] == 1, "the first token, unless the metadata says otherwise"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("\u00e9", add_special_tokens=False)) == [
        SPACE, "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    marked = tokenizer.encode("hello<mark>hello", add_special_tokens=False)
    assert 3 in marked
    assert tokenizer.decode(marked, skip_special_tokens=True).count("<mark>") == 1, "it is text"
    plain = build_tokenizer(
        sentencepiece(tmp_path, add_space_prefix=("bool", False), add_bos_token=("bool", False))
    )
    assert plain.convert_ids_to_tokens(plain.encode("hello")) == by_score("hello")
    ended = build_tokenizer(sentencepiece(tmp_path, add_eos_token=("bool", True)))
    assert ended.encode("hello")[-1] == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ("str", "rwkv")}, "tokenizer.ggml.model 'rwkv' is not supported; supported: gpt2, llama"),
        ({"model": ("str", "gpt2"), "pre": ("str", "bloom")}, "'bloom' is not supported; supported: gpt-2, "),
        ({"model": ("str", "gpt2"), "pre": ("str", "qwen2")}, "tokenizer.ggml.merges is missing; accepted"),
        (
            {"model": ("str", "gpt2"), "pre": ("str", "qwen2"), "merges": ("[str]", ["a x"])},
            "'a x' is no merge of two tokens into a third",
        ),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing; accepted: an array of texts"),
        ({"tokens": ("[str]", [])}, "has 0 tokens; accepted: 1 to"),
        ({"tokens": ("[str]", ["a", "b", "a"])}, "'a' is token 0 and token 2; accepted: each token once"),
        ({"token_type": ("[i32]", [1])}, "token_type .*; accepted: an array of 8 numbers"),
        ({"scores": ("[f32]", [1.0])}, "scores .*; accepted: an array of 8 numbers"),
        ({"bos_token_id": ("u32", 8)}, "bos_token_id is 8; accepted: 0 to 7"),
        ({"add_bos_token": ("u8", 1)}, "add_bos_token is 1; accepted: a boolean"),
    ],
)
def test_wrong_tokenizers_are_refused(changes: Any, message: str, tmp_path: Path) -> None:
    file = file_with(tmp_path, **changes)
    with pytest.raises((CheckpointError, UnsupportedModel), match=message):
        build_tokenizer(file)
