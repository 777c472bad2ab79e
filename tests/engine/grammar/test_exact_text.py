"""Forms that contain any Unicode text are followed to the byte, with any normalizer of the tokenizer.

A user asked for one of the choices "cafe" + U+0301 and "tea". The tokenizer composes accents, as it should in
a prompt, so the forced tokens spelled another text than the form, and the request failed in mid-answer.
"""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fovea.core.constraints import AnswerFormat, Tool, ToolUse
from fovea.core.errors import InvalidRequest
from fovea.dialects.dialect import FORMATS, Dialect
from fovea.dialects.grammar import request_format
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.trial import load_vocabulary
from fovea.engine.request.detokenize import TextStream
from fovea.engine.request.prepare import FULL_STOP
from fovea.engine.request.tokenizer import ChatTokenizer
from tests.support.thorough import examples

END = "<|end|>"
TEXTS = [
    "cafe\u0301", "\u09df", "\u095b", "10 \u212b", "\u1100\u1161\u11a8", "\ufb01 \u2460 \uff21", "ABC",
    "\u0130I", " a b ", "\u2581a\u2581", "  \u00a0\u3000", END, f"a {END} b", "<tool>", "a <tool> b",
    "a\u200db\ufeff\u2028", "\U0001f469\U0001f3fd",
]  # fmt: skip
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "lowercase": normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    ),
    "strip": normalizers.Strip(),
}


def byte_level(normalizer: str, *, space_before: bool = False) -> Tokenizer:
    """A tokenizer as that of GPT-2: every byte is written as a character."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("Ġ", "a"), ("c", "a"), ("ca", "f"), ("Ã", "©"), ("Ġ", "b")]
    for left, right in merges:
        letters[left + right] = len(letters)
    raw = Tokenizer(models.BPE(letters, merges))
    raw.normalizer = NORMALIZERS[normalizer]
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_before)
    raw.decoder = decoders.ByteLevel()
    return raw


def sentencepiece(normalizer: str, *, space_before: str = "normalizer") -> Tokenizer:
    """A tokenizer as that of Llama 2: it writes spaces as U+2581 and other characters as bytes."""
    letters = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for letter in '\u2581abcdefABC"{}:,\u00e9':
        letters[letter] = len(letters)
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b"), ("c", "a")]
    for left, right in merges:
        letters[left + right] = len(letters)
    raw = Tokenizer(models.BPE(letters, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [NORMALIZERS[normalizer]] if NORMALIZERS[normalizer] is not None else []
    if space_before == "normalizer":
        raw.normalizer = normalizers.Sequence(
            [*parts, normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        raw.normalizer = normalizers.Sequence(parts)
        raw.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", space_before, split=False)
    replace = decoders.Replace("\u2581", " ")
    strip = decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return raw


RAW = {
    **{f"bytes, {name}": lambda name=name: byte_level(name) for name in NORMALIZERS},
    "bytes, space before": lambda: byte_level("none", space_before=True),
    **{f"sentencepiece, {name}": lambda name=name: sentencepiece(name) for name in NORMALIZERS},
    "sentencepiece, metaspace": lambda: sentencepiece("none", space_before="always"),
}


@cache
def built(kind: str) -> tuple[ChatTokenizer, LLTokenizer]:
    raw = RAW[kind]()
    raw.add_special_tokens([AddedToken(END, special=True)])
    raw.add_tokens([AddedToken("<tool>", special=False, lstrip=True, rstrip=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer = ChatTokenizer(fast, None, eos_ids=frozenset({raw.token_to_id(END)}))
    return tokenizer, load_vocabulary(tokenizer, raw.get_vocab_size() + 5)


def write(kind: str, form: AnswerFormat, seed: int = 0) -> str:
    """Follow a form with random tokens that its masks allow. Returns the answer's text."""
    tokenizer, vocabulary = built(kind)
    matcher = compile_format(form, vocabulary)
    (end,) = tokenizer.eos_ids
    stream = TextStream(tokenizer.decode, before=tokenizer.encode_plain(FULL_STOP))
    text, rng = "", Random(seed)
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.nonzero(mask)[0].tolist()
        forced = matcher.compute_ff_tokens()
        assert allowed, matcher.get_error()
        assert not forced or forced[0] in allowed
        token = rng.choice(allowed)
        if token == end:
            break
        assert matcher.consume_token(token), matcher.get_error()
        text += stream.push(token)
    assert not matcher.is_error(), matcher.get_error()
    return text + stream.finish()


def forms(text: str) -> list[tuple[AnswerFormat, str]]:
    """Forms that allow one text, or JSON that contains it, and what they allow."""
    closed = {"type": "object", "additionalProperties": False}
    key = {**closed, "properties": {text: {"type": "null"}}, "required": [text]}
    written = json.dumps(text, ensure_ascii=False)
    quoted = "".join(f"\\x{{{ord(char):x}}}" for char in text)
    return [
        (AnswerFormat.choice([text]), text),
        (AnswerFormat.regex(quoted), text),
        (AnswerFormat.json_schema({"const": text}), written),
        (AnswerFormat.json_schema({"enum": [text]}), written),
        (AnswerFormat.json_schema({"type": "string", "pattern": f"^{quoted}$"}), written),
        (AnswerFormat.json_schema(key), f"{{{written}:null}}"),
    ]


@pytest.mark.parametrize("kind", RAW)
def test_texts_that_a_tokenizer_changes_are_written_as_they_are(kind: str) -> None:
    """Accents, ligatures, capitals, spaces at the edges, and the characters of the model's own tokens."""
    for text in TEXTS:
        for form, expected in forms(text):
            assert write(kind, form).replace(": null", ":null") == expected, (form, text)


@pytest.mark.parametrize("notation", FORMATS)
@pytest.mark.parametrize("kind", ["bytes, NFC", "sentencepiece, NFKC"])
def test_arguments_of_tool_calls_are_written_as_they_are(kind: str, notation: str) -> None:
    """In every way in which models write calls: as JSON, like Python, and between tags."""
    for text in TEXTS[:5]:
        parameters = {"type": "object", "properties": {"x": {"enum": [text]}}, "required": ["x"]}
        tool = Tool("f", parameters, {})
        form = request_format(ToolUse((tool,), "required"), None, Dialect(FORMATS[notation]))
        assert form is not None
        assert text in write(kind, form), text


@given(st.data())
@settings(max_examples=examples(20), deadline=None)
def test_any_text_is_written_exactly_or_refused(data: st.DataObject) -> None:
    """Refused are only those with control characters, which JSON here cannot write."""
    kind = data.draw(st.sampled_from(sorted(RAW)))
    text = data.draw(st.text(min_size=1, max_size=6))
    for form, expected in forms(text):
        try:
            written = write(kind, form, data.draw(st.integers(0, 3)))
        except InvalidRequest:
            assert any(char < " " or char == "\x7f" for char in text)
            continue
        assert written.replace(": null", ":null") == expected.replace(": null", ":null"), form


def test_a_tokenizer_whose_tokens_have_no_known_bytes_is_refused() -> None:
    """Words and their parts with "##" between them: no answer's bytes follow from its tokens."""
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, END: 3}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw), None, eos_ids=frozenset({3}))
    with pytest.raises(InvalidRequest, match="structured output: its tokens are") as caught:
        load_vocabulary(tokenizer, 4)
    assert caught.value.code == "unsupported_field"
