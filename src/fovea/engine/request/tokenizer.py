"""A checkpoint's tokenizer and chat template: text to ids, ids to text, and messages to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.types import Message, TemplateInputs
from fovea.dialects.dialect import Dialect, detect
from fovea.engine.request.chat_template import NOTHING, ChatTemplate
from fovea.engine.request.control_tokens import ControlTokens, SealedTokenizer
from fovea.engine.request.detokenize import TextStream

NORMALISATION_MARGIN = 4
UNKNOWN = "\U0010fffd"
"""A character that vocabularies lack."""
MARKER_FIELDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Fields of config.json with the ids that stand for visual tokens."""
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
    backend: the tokenizer of the library `tokenizers`; None if this one is written in Python.
    marker_ids: ids that stand for visual tokens of images and videos.
    reasoning_marks: the tokens that begin the model's reasoning, and those that end it; None: it does not
        reason.
    dialect: how the model writes reasoning and tool calls; None: as the template tells.
    image_text: see `ChatTemplate`.
    decodes_by_backend: the tokenizer's `decode` does nothing but call that of `backend`.
    drops_first_space: whether a text loses the space with which its first token begins, as it does by
        sentencepiece.

    Raises CheckpointError if the template is not Jinja.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        *,
        eos_ids: frozenset[int],
        marker_ids: frozenset[int] = frozenset(),
        dialect: Dialect | None = None,
        image_text: str | None = None,
        decodes_by_backend: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        added = tokenizer.added_tokens_decoder
        self.backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decodes_by_backend = decodes_by_backend
        self.dialect = dialect if dialect is not None else detect(template)
        self._controls = ControlTokens(added, template or "", eos_ids | marker_ids)
        self._template = ChatTemplate(tokenizer, template, self._controls, image_text)
        self._sealed = SealedTokenizer(self.backend, self._controls)
        self._specials = frozenset(tokenizer.added_tokens_decoder)
        self._byte_level = BYTE_LEVEL_SPACE in tokenizer.get_vocab()
        marks = self.dialect.reasoning
        self.reasoning_marks = marks and (
            tuple(self.encode_plain(marks[0])),
            tuple(self.encode_plain(marks[1])),
        )
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        spaced = re.compile(f"{SENTENCEPIECE_SPACE}[^{SENTENCEPIECE_SPACE}]")
        word = next((word for word in tokenizer.get_vocab() if spaced.match(word)), None)
        self.drops_first_space = word is not None and not self.decode(
            [tokenizer.convert_tokens_to_ids(word)]
        ).startswith(" ")

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def agreement(self, other: ChatTokenizer) -> float:
        """Return the share of the vocabulary whose tokens have the same ids in another tokenizer."""
        mine, theirs = self._tokenizer.get_vocab(), other._tokenizer.get_vocab()
        equal = [theirs.get(token) == number for token, number in mine.items()]
        return float(sum(equal)) / len(equal)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template. Without one, conversations are refused."""
        return self._template.exists

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text, such as those that begin a turn.

        Not all added tokens are special: those of Qwen around tool calls are text.
        """
        return frozenset(
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        )

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Return the ids with which the tokenizer begins every text, such as that of `<bos>`."""
        probe = self.encode_plain("a")
        ids: list[int] = self._tokenizer.encode("a", add_special_tokens=True)
        return tuple(ids[: ids.index(probe[0])])

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenizing it.

        No token is longer than the vocabulary's longest. Normalisation may merge characters, hence the
        margin.
        """
        return len(text) // (self._longest * NORMALISATION_MARGIN)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. The tokenizer adds its special tokens, unless the text begins with one.

        The characters of a control token become that token. Raises InvalidRequest for text that is not
        Unicode.
        """
        check_unicode(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self._adds_start(text))
        return ids

    def _adds_start(self, text: str) -> bool:
        """Whether the tokenizer adds its special tokens to a text: it does not begin with one already."""
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def is_sealed(self, text: str) -> bool:
        """Whether a text has sealed control tokens."""
        return self._controls.is_sealed(text)

    def seal(self, text: str) -> str:
        """Return a text of our own with sealed control tokens, to be inserted into a sealed text."""
        return self._controls.seal(text)

    def encode_sealed(self, text: str) -> list[int]:
        """Return the ids of a text of `render_sealed`. No control token in them stems from a message.

        Text without the characters of one has exactly the ids of `encode`. Raises InvalidRequest for text
        that is not Unicode, and for a control token that this tokenizer can only read as such.
        """
        if not self._controls.is_sealed(text):
            ids = self.encode(text)
            # The ids tell what the tokenizer's own normalisation makes a control token of, as NFKC does of
            # wide characters.
            if self._holds(ids, self._controls.plain_ids(text)):
                return ids
            text = self._controls.seal(text)
        check_unicode(text)
        bos = self._tokenizer.bos_token
        add = not (bos and text.startswith(self._controls.seal(bos)))
        inert = self._sealed.encode(text, add_special_tokens=add)
        if inert is None or not self._holds(inert, self._controls.sealed_ids(text)):
            raise InvalidRequest(
                "the text of a message contains a control token of the model, and this model's tokenizer "
                "cannot read it as text; remove it, or start with --special-tokens-in-text true",
                param="messages",
            )
        return inert

    def _holds(self, ids: list[int], expected: list[int]) -> bool:
        """Whether the control tokens among the ids are the expected ones.

        The tokenizer's own start and end tokens, and its token for unknown characters, may be there, too.
        """
        tokens = self._controls.among(ids)
        if tokens == expected:
            return True
        unknown = self._controls.among(self._tokenizer.encode(UNKNOWN, add_special_tokens=False))
        own = self._controls.among(self._tokenizer.encode("", add_special_tokens=True))
        tokens, expected = ([i for i in those if i not in unknown] for those in (tokens, expected))
        return (
            any(own[:at] + expected + own[at:] == tokens for at in range(len(own) + 1)) or tokens == expected
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._decodes_by_backend and self.backend is not None:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def offsets(self, ids: Sequence[int], text: str | None) -> list[int]:
        """Return the place of each token of a prompt in the prompt's text, in characters.

        text: as the client sent it, from which `encode` made the ids. The tokenizer may change characters
            (NFC, for example), so the places are those that the library noted. None: the text of the ids.
        """
        if text is not None and self.backend is not None:
            encoding = self.backend.encode(text, add_special_tokens=self._adds_start(text))
            if encoding.ids == list(ids):
                return self._starts(encoding.ids, encoding.offsets)
        stream = TextStream(lambda window: self.decode(window, skip_special_tokens=False))
        places = []
        for token in ids:
            places.append(stream.length)
            stream.push(token)
        return places

    def _starts(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return where tokens begin. Some tokenizers leave the white space at both ends out of their spans.

        The tokens that a tokenizer adds to every prompt have the span (0, 0).
        """
        starts, end = [], 0
        for token, (begin, stop) in zip(ids, spans, strict=True):
            if begin > end:
                word = self.token_bytes(token).decode(errors="replace")
                begin = max(end, begin - (len(word) - len(word.lstrip())))
            starts.append(begin if stop >= end else end)
            end = max(end, stop)
        return starts

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

    def render(self, messages: Sequence[Message], inputs: TemplateInputs = NOTHING) -> str:
        """Return a conversation as text in the model's chat format, ending where the answer begins.

        Each image and each video is one marker.

        Raises InvalidRequest if there is no template, or if the template refuses the messages.
        """
        return self._template.render(messages, inputs)

    def render_sealed(self, messages: Sequence[Message], inputs: TemplateInputs = NOTHING) -> str:
        """Return the conversation for `encode_sealed`.

        If messages contain control tokens, those of the template are sealed, and the others are plain text.
        Raises InvalidRequest as `render`, and for a role that contains a control token.
        """
        return self._template.render_sealed(messages, inputs)

    def ends_thinking(self, text: str) -> bool:
        """Whether a text of `render_sealed` ends inside the model's reasoning, which the template began."""
        if self.dialect.reasoning is None:
            return False
        begin, end = self.dialect.reasoning
        plain = self._controls.unseal(text)
        return plain.rstrip().endswith(begin) and plain.rfind(end) < plain.rfind(begin)


def detokenize(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Return the text of token ids, special tokens included. Raises InvalidRequest for an unknown id."""
    for index, token in enumerate(ids):
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequest(
                f"tokens[{index}]: {token} is outside [0, {tokenizer.vocab_size})", param=f"tokens[{index}]"
            )
    return tokenizer.decode(ids, skip_special_tokens=False)


def check_unicode(text: str) -> None:
    """Raise InvalidRequest for text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end]
        raise InvalidRequest(
            f"the text holds {half!r}, half of a surrogate pair", param="messages"
        ) from error
