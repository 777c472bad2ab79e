"""Builds a tokenizer of the library `tokenizers` from the metadata of a GGUF file.

A file has a list of tokens with their kinds, and either the merges of a byte-level BPE vocabulary ("gpt2") or
the scores of a sentencepiece vocabulary ("llama"). How text is split before the merges is only named; the
names here are those of llama.cpp, and the patterns those of the models' own tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fovea.core.errors import CheckpointError, UnsupportedModel
from fovea.engine.files import BOUNDS
from fovea.engine.models.gguf.metadata import Metadata
from fovea.engine.models.gguf.reader import GgufFile

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Kinds of tokens: special ones, those that are always matched whole, and single bytes."""
SPACE = "\u2581"
"""The character that stands for a space in a sentencepiece vocabulary."""
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "<end_of_utterance>", "<eos>", "</s>",
)  # fmt: skip
"""Special tokens that end an answer wherever they exist, beside those that the metadata names."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitter:
    """How a byte-level tokenizer splits text.

    patterns: the text is split by each of them in turn.
    whole_words: a word that is a token is that token, whatever the merges are.
    composes: text is brought to Unicode's normal form C first.
    starts: a token begins every prompt, unless the metadata says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    composes: bool = False
    starts: bool = False


_LLAMA3_SPLITTER = Splitter((_LLAMA3,), whole_words=True, starts=True)
_QWEN2_SPLITTER = Splitter((_QWEN2,), composes=True)
_DIGITS = Splitter((r"\p{N}", _GPT2))
SPLITTERS: Mapping[str, Splitter] = {
    "gpt-2": Splitter((_GPT2,)),
    "granite-docling": Splitter((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2_SPLITTER,
    "deepseek-r1-qwen": Splitter((_QWEN2,)),
    "qwen35": Splitter((_QWEN35,), composes=True),
    "llama-bpe": _LLAMA3_SPLITTER,
    "llama3": _LLAMA3_SPLITTER,
    "llama-v3": _LLAMA3_SPLITTER,
    "pixtral": _LLAMA3_SPLITTER,
    "lfm2": _LLAMA3_SPLITTER,
    "falcon3": _LLAMA3_SPLITTER,
    "smaug-bpe": Splitter((_LLAMA3,)),
    "tekken": Splitter((_TEKKEN,), whole_words=True, starts=True),
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By tokenizer.ggml.pre. "default" is how llama.cpp splits text for files that do not say it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    tokens: by id. Each is there once.
    kinds: kind of each.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]

    def of_kind(self, kind: int) -> list[str]:
        return [token for token, of in zip(self.tokens, self.kinds, strict=True) if of == kind]


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Return the tokens of a file. Raises CheckpointError."""
    entries = Metadata(file, "tokenizer.ggml.")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(entries.texts("tokens"))]
    most = BOUNDS["vocab_size"]
    if not 0 < len(tokens) <= most:
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens; accepted: 1 to {most}")
    if len(set(tokens)) < len(tokens):
        ids: dict[str, int] = {}
        number, token = next((n, t) for n, t in enumerate(tokens) if ids.setdefault(t, n) != n)
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens: {token[:50]!r} is token {ids[token]} and token {number}; "
            "accepted: each token once"
        )
    kinds = entries.numbers("token_type", len(tokens), default=[1] * len(tokens))
    return Vocabulary(tokens, kinds)


def build_tokenizer(file: GgufFile) -> Any:
    """Return a transformers tokenizer. Raises CheckpointError or UnsupportedModel."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    entries, vocabulary = Metadata(file, "tokenizer.ggml."), read_vocabulary(file)
    model = entries.text("model")
    build = BUILDERS.get(model)
    if build is None:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model {model[:50]!r} is not supported; supported: "
            f"{', '.join(BUILDERS)}"
        )
    backend, starts = build(entries, vocabulary)
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_kind(CONTROL)]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of_kind(USER_DEFINED)])
    names = {
        name: vocabulary.tokens[number]
        for name, key in _SPECIAL.items()
        if (number := _token_id(entries, f"{key}_token_id", vocabulary)) is not None
    }
    _add_ends(backend, entries, names, starts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names in transformers and in files of tokens with a meaning."""


def end_ids(file: GgufFile) -> frozenset[int]:
    """Return the ids of the tokens that end an answer. Raises CheckpointError."""
    entries, vocabulary = Metadata(file, "tokenizer.ggml."), read_vocabulary(file)
    named = (_token_id(entries, f"{name}_token_id", vocabulary) for name in ("eos", "eot", "eom"))
    ids = {number for number in named if number is not None}
    ids |= {
        number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED) and token in ENDS
    }
    return frozenset(ids)


def chat_template(file: GgufFile) -> str | None:
    """Return the chat template of a file; None: it has none. Raises CheckpointError."""
    entries = Metadata(file, "tokenizer.")
    return entries.text("chat_template") if "chat_template" in entries else None


def _token_id(entries: Metadata, name: str, vocabulary: Vocabulary) -> int | None:
    """Return the id of a token that the metadata names; None: it names none."""
    if name not in entries:
        return None
    number = entries.integer(name)
    if not 0 <= number < len(vocabulary.tokens):
        # Converters write the largest number for a token that a model does not have.
        if number == 0xFFFFFFFF:
            return None
        entries.refuse(name, f"0 to {len(vocabulary.tokens) - 1}")
    return number


def _add_ends(backend: Any, entries: Metadata, names: Mapping[str, str], starts: bool) -> None:
    """Let the tokenizer add the tokens that begin and end a text, if the metadata says so."""
    from tokenizers import processors

    begin = [names["bos_token"]] if entries.boolean("add_bos_token", starts) and "bos_token" in names else []
    end = [names["eos_token"]] if entries.boolean("add_eos_token", False) and "eos_token" in names else []
    if not begin and not end:
        return
    single = [*begin, "$A", *end]
    ends = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*begin, *end))]
    template = processors.TemplateProcessing(
        single=single, pair=[*single, *(f"{piece}:1" for piece in (*begin, "$B", *end))], special_tokens=ends
    )
    own = backend.post_processor
    backend.post_processor = template if own is None else processors.Sequence([own, template])


def _byte_level(entries: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """Build a byte-level BPE tokenizer. Returns it, and whether a token begins every text by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    name = entries.text("pre", "default")
    splitter = SPLITTERS.get(name)
    if splitter is None:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre {name[:50]!r} is not supported; supported: {', '.join(SPLITTERS)}"
        )
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = []
    for merge in entries.texts("merges"):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(
                f"tokenizer.ggml.merges: {merge[:100]!r} is no merge of two tokens into a third; accepted: "
                "LEFT RIGHT"
            )
        merges.append((left, right))
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=splitter.whole_words))
    if splitter.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend, splitter.starts


def _sentencepiece(entries: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """Build a tokenizer that merges the pair with the highest score first. See `_byte_level`."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    scores = entries.numbers("scores", len(ids))
    unknown = _token_id(entries, "unknown_token_id", vocabulary)
    backend = Tokenizer(
        models.BPE(
            ids,
            _merges(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    spaced = entries.boolean("add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if spaced else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return backend, True


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a third one, the one with the highest score first.

    Tokens that are matched whole, and bytes, take no part.
    """
    usual = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in (CONTROL, USER_DEFINED, BYTE)
    }
    merges: list[tuple[str, str]] = []
    for token in sorted(usual, key=lambda token: (-scores[usual[token]], usual[token])):
        merges += [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in usual and token[at:] in usual
        ]
    return merges


BUILDERS: Mapping[str, Callable[[Metadata, Vocabulary], tuple[Any, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""By tokenizer.ggml.model."""
