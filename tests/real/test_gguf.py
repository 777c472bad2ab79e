"""Two pretrained decoders straight from their GGUF files: transformers' weights, llama.cpp's tokens."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from fovea import Engine
from fovea.core.types import TextPrompt
from fovea.engine.models.gguf.checkpoint import GgufCheckpoint, find_gguf
from tests.real.conftest import TEXT, Decoder
from tests.support import real_models

NAMES = ["smollm2", "gemma"]
PIECE = 700
TEXTS = (
    "  a  b\n\n\n c\t\t",
    "<table><tr> x </tr>",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3001\u00e9moji \U0001f600 e\u0301",
    "1234567 89",
    "def f(x):\n    return x  # two\n",
    "<|im_start|>user\nhi<|im_end|>",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    " leading",
    "trailing ",
    "x" * 300,
    "a" + " " * 80 + "b",
    "\n" * 40,
)


def checkpoint(decoder: Decoder) -> GgufCheckpoint:
    found = find_gguf(real_models.gguf_file(decoder.name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    """All values, bit for bit. transformers reads the same file with code of its own."""
    decoder: Decoder = request.getfixturevalue(name)
    file = checkpoint(decoder)
    weights = file.weights(file.config())
    count = 0
    with safe_open(decoder.folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        for number, (_, entries) in enumerate(weights.files):
            for entry in entries:
                values = torch.empty(entry.shape or ())
                weights.read(number, entry, values)
                assert torch.equal(values, stored.get_tensor(entry.name).float()), entry.name
                names.discard(entry.name)
                count += values.numel()
    weights.close()
    assert names <= {"lm_head.weight"}, "the head is the embedding table"
    print(f"\n{decoder.name}: {count:,} values are equal")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_llama_cpp(name: str, request: pytest.FixtureRequest) -> None:
    from llama_cpp import Llama

    decoder: Decoder = request.getfixturevalue(name)
    file = checkpoint(decoder)
    tokenizer = file.tokenizer(file.config())
    theirs = Llama(str(real_models.gguf_file(decoder.name)), vocab_only=True, verbose=False)
    text = TEXT.read_text("utf-8")
    texts = [*(text[at : at + PIECE] for at in range(0, len(text), PIECE)), *TEXTS]
    for piece in texts:
        expected = theirs.tokenize(piece.encode(), add_bos=False, special=True)
        assert tokenizer.encode_plain(piece) == expected, piece
        assert tokenizer.decode(expected, skip_special_tokens=False) == piece
    print(f"\n{decoder.name}: the tokens of {len(texts)} texts are equal")


@pytest.mark.parametrize("name", NAMES)
def test_the_file_answers_in_english(name: str, request: pytest.FixtureRequest) -> None:
    """The codes stay as they are, in bfloat16 and with the kernels that the machine has."""
    decoder: Decoder = request.getfixturevalue(name)
    path = str(real_models.gguf_file(decoder.name))
    with Engine.from_pretrained(path, kv_cache_mib=256) as engine:
        assert engine.info.quantization.startswith("gguf q")
        if engine.tokenizer.has_template:
            question = "What is the capital city of France? Answer in English."
            answer = engine.generate(question, temperature=0, max_tokens=16)
            assert "Paris" in answer.text
            assert answer.finish_reasons == ("stop",)
        else:
            days = TextPrompt("Monday, Tuesday, Wednesday, Thursday,")
            answer = engine.generate(days, temperature=0, max_tokens=6)
            assert answer.text.startswith(" Friday, Saturday")
    print(f"\n{decoder.name}: {answer.text!r}")
