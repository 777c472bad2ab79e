"""A checkpoint's tokenizer and chat template: text to ids, ids to text, and messages to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.types import Message, TextPart, VideoPart

NORMALISATION_MARGIN = 4
BYTE_LEVEL_SPACE, SENTENCEPIECE_SPACE = "\u0120", "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of every character of a byte-level vocabulary.

    Such a vocabulary writes each byte as one printable character: a printable byte as itself, the others as
    the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class ChatTokenizer:
    """A transformers tokenizer and the chat template that turns messages into text.

    tokenizer: an object with the interface of a transformers tokenizer.
    template: Jinja source; None: conversations are refused.
    eos_ids: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, template: str | None, *, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._eos_ids = eos_ids
        self._specials = frozenset(tokenizer.added_tokens_decoder)
        self._byte_level = BYTE_LEVEL_SPACE in tokenizer.get_vocab()
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._content_as_list = self._accepts_lists()

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenizing it.

        No token is longer than the vocabulary's longest. Normalisation may merge characters, hence the
        margin.
        """
        return len(text) // (self._longest * NORMALISATION_MARGIN)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. The tokenizer adds its special tokens, unless the text begins with one.

        Raises InvalidRequest for text that is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start : error.end]
            raise InvalidRequest(
                f"the text holds {half!r}, half of a surrogate pair", param="messages"
            ) from error
        bos = self._tokenizer.bos_token
        add = not (bos and text.startswith(bos))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one id stands for. They need not be whole characters."""
        token = self.token_text(token_id) if token_id < self.vocab_size else ""
        if token_id in self._specials:
            return token.encode()
        if self._byte_level:
            return bytes(BYTE_OF[char] for char in token if char in BYTE_OF)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        return bytes([int(byte.group(1), 16)]) if byte else token.replace(SENTENCEPIECE_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """Return the written form of one id, special tokens included. The image marker is such a form.

        Raises CheckpointError if the tokenizer has no such id.
        """
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise CheckpointError(f"the tokenizer has no token {token_id}")
        return token

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation as text in the model's chat format, ending where the answer begins.

        Each image and each video is one marker.

        Raises InvalidRequest if there is no template, or if the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; use a text prompt, or start with --chat-template FILE",
                param="messages",
            )
        plain = [{"role": m.role, "content": self._content(m)} for m in messages]
        return self._apply(plain)

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return text

    def _content(self, message: Message) -> Any:
        if not self._content_as_list and all(isinstance(p, TextPart) for p in message.parts):
            return "".join(part.text for part in message.parts if isinstance(part, TextPart))
        return [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": "video" if isinstance(part, VideoPart) else "image"}
            for part in message.parts
        ]

    def _accepts_lists(self) -> bool:
        """Test with a probe message whether the template takes content as a list of parts, or as text."""
        if self._template is None:
            return True
        probe = "fovea-probe-7f3a"
        try:
            text = self._apply([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except InvalidRequest:
            return False
        return probe in text and "{'type'" not in text
