"""The vocabulary of a model in the form in which the grammar library reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fovea.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLTokenizer


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
    from llguidance import LLTokenizer

    ends = sorted(token for token in tokenizer.eos_ids if token < size)
    try:
        return LLTokenizer(_source(tokenizer, size, ends), n_vocab=size, eos_token=ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code is no Exception
        raise InvalidRequest(
            f"this model's tokenizer cannot be used for structured output: {str(error)[:300]}",
            code="unsupported_field",
        ) from error


def _source(tokenizer: GrammarTokenizer, size: int, ends: Sequence[int]) -> Any:
    if tokenizer.backend is not None:
        import tokenizers

        copy = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        content = json.loads(copy.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
        return json.dumps(content)
    from llguidance import TokenizerWrapper

    tokens = [tokenizer.token_bytes(token) for token in range(min(size, tokenizer.vocab_size))]
    return TokenizerWrapper(
        PlainTokens(
            tokens,
            ends[0],
            sorted(token for token in tokenizer.special_ids if token < size),
            tokenizer.encode_plain,
        )
    )


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
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end] if specials is None else specials
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if self._encode is None:
            return list(text if isinstance(text, bytes) else text.encode())
        return self._encode(text if isinstance(text, str) else text.decode())
