"""The vocabulary of a model in the form in which the grammar library reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from fovea.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Encode = Callable[[str], list[int]]
MOST_TEXTS, LONGEST_TEXT = 4096, 256
"""Number and length in characters of the texts whose tokens are remembered: forced texts come again."""


class GrammarTokenizer(Protocol):
    """The tokenizer of a model, as far as grammars need it."""

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`; None: there is none."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def load_vocabulary(tokenizer: GrammarTokenizer, size: int) -> LLTokenizer:
    """Return the vocabulary. For a large one it takes about a second.

    size: number of the model's logits. Ids that the tokenizer lacks are never allowed. Special tokens of the
        tokenizer after those, such as the image token of Llama 3.2 Vision, are left out.

    Raises InvalidRequest if the library cannot read the tokenizer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(token for token in tokenizer.eos_ids if token < size)
    try:
        encode = tokenizer.encode_plain if tokenizer.backend is None else _plain_encode(tokenizer.backend)
        tokens = [tokenizer.token_bytes(token) for token in range(min(size, tokenizer.vocab_size))]
        specials = sorted(token for token in tokenizer.special_ids | set(ends) if token < size)
        plain = PlainTokens(tokens, ends[0], specials, _exact(encode, tokens, frozenset(specials)))
        return LLTokenizer(TokenizerWrapper(plain), n_vocab=size, eos_token=ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        raise InvalidRequest(
            f"this model's tokenizer cannot be used for structured output: {str(error)[:300]}",
            code="unsupported_field",
        ) from error


def _plain_encode(backend: Any) -> Encode:
    """Return a function that encodes a text as it is, with as little as possible of what a tokenizer changes.

    A normalizer composes accents or lowers letters, a pre-tokenizer puts a space before the text, and the
    characters of a control token become that token. All of this is right for a prompt and wrong here.

    Raises ValueError if the bytes of its tokens are unknown.
    """
    import tokenizers

    content = json.loads(backend.to_str())
    decoder = content.get("decoder") or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ValueError("its tokens stand neither for bytes nor for text with single bytes")
    content["normalizer"] = {"type": "Sequence", "normalizers": list(_spaces(content.get("normalizer")))}
    _write_no_space_before(content.get("pre_tokenizer"))
    content["truncation"] = content["padding"] = content["post_processor"] = None
    copy = tokenizers.Tokenizer.from_str(json.dumps(content))
    copy.encode_special_tokens = True  # the characters of one are text

    def encode(text: str) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = copy.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    return encode


def _spaces(normalizer: Any) -> Iterator[Any]:
    """Yield the parts of a normalizer that only write spaces in another way, such as SentencePiece's."""
    if normalizer is None:
        return
    if normalizer["type"] == "Sequence":
        for part in normalizer["normalizers"]:
            yield from _spaces(part)
    elif normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}:
        yield normalizer


def _write_no_space_before(pre_tokenizer: Any) -> None:
    """Change a pre-tokenizer, in place, so that it adds no space before a text."""
    if pre_tokenizer is None:
        return
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"


def _exact(encode: Encode, tokens: Sequence[bytes], specials: frozenset[int]) -> Encode:
    """Return `encode` for the library, which relies on tokens that have exactly the bytes of the text.

    If the tokenizer changes a text nevertheless, its characters are encoded one by one, and those without a
    token as bytes.
    """
    of_bytes = {token: number for number, token in enumerate(tokens) if number not in specials}

    @lru_cache(MOST_TEXTS)
    def exact(text: str) -> tuple[int, ...]:
        ids = tuple(encode(text))
        if not specials.intersection(ids) and b"".join(tokens[i] for i in ids) == text.encode():
            return ids
        pieces: list[int] = []
        for char in text:
            whole = of_bytes.get(char.encode())
            single = [of_bytes.get(bytes([byte])) for byte in char.encode()] if whole is None else [whole]
            if None in single:
                return ids  # this vocabulary cannot write the text; the answer fails where it has to
            pieces += [i for i in single if i is not None]
        return tuple(pieces)

    return lambda text: list(exact(text) if len(text) <= LONGEST_TEXT else exact.__wrapped__(text))


class PlainTokens:
    """A tokenizer that is written in Python, with the attributes that the library's wrapper asks for.

    tokens: bytes of each id.
    end: id that ends an answer.
    specials: ids that stand for no text; None: `end` alone.
    encode: turns text into ids; None: the ids are the text's bytes.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        end: int,
        specials: Sequence[int] | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end] if specials is None else specials
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if self._encode is None:
            return list(text if isinstance(text, bytes) else text.encode())
        return self._encode(text if isinstance(text, str) else text.decode())
