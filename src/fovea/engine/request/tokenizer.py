"""Text to ids with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.types import Message, TextPart, VideoPart
from fovea.engine.files import read_json

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
NORMALISATION_MARGIN = 4
BYTE_LEVEL_SPACE, SENTENCEPIECE_SPACE = "\u0120", "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself where it is one, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
LLAVA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% for c in message['content'] %}{{ c['text'] }} {% endfor %}"
    "{% else %}{{ 'USER: ' if message['role'] == 'user' else 'ASSISTANT: ' }}"
    "{% for c in message['content'] if c['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in message['content'] if c['type'] == 'text' %}{{ c['text'] }}{% endfor %}"
    "{{ ' ' if message['role'] == 'user' else '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class ChatTokenizer:
    """A transformers tokenizer and the template that turns messages into its text."""

    def __init__(self, tokenizer: Any, template: str | None, *, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._eos_ids = eos_ids
        self._specials = frozenset(tokenizer.added_tokens_decoder)
        self._byte_level = BYTE_LEVEL_SPACE in tokenizer.get_vocab()
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._content_as_list = self._wants_lists()

    @classmethod
    def from_folder(cls, folder: Path, config: Any, *, template: str | None = None) -> ChatTokenizer:
        """`template` replaces the checkpoint's own. Raises CheckpointError when no tokenizer can be made."""
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in VOCABULARIES):
            # transformers makes an empty tokenizer of such a folder, and nothing fails before the first answer.
            raise CheckpointError(
                f"{folder} has no usable tokenizer: none of {', '.join(VOCABULARIES)} is there"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(f"{folder} has no usable tokenizer: {error}") from error
        chosen = template or tokenizer.chat_template or _template_file(folder)
        if chosen is None and config.model_type == "llava":
            chosen = LLAVA_TEMPLATE
        return cls(tokenizer, chosen, eos_ids=_eos_ids(folder, config, tokenizer))

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`, without tokenizing it.

        No token is longer than the vocabulary's longest; normalisation may merge characters, hence the margin.
        """
        return len(text) // (self._longest * NORMALISATION_MARGIN)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds unless the text begins with them.

        Raises InvalidRequest for text that is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = text[error.start : error.end]
            raise InvalidRequest(
                f"the text holds {at!r}, half of a surrogate pair", param="messages"
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
        """The bytes that one id stands for, be they whole characters or not."""
        token = self.token_text(token_id) if token_id < self.vocab_size else ""
        if token_id in self._specials:
            return token.encode()
        if self._byte_level:
            return bytes(BYTE_OF[char] for char in token if char in BYTE_OF)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        return bytes([int(byte.group(1), 16)]) if byte else token.replace(SENTENCEPIECE_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """The written form of one id, special tokens included; the image marker is such a form."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            raise CheckpointError(f"the tokenizer has no token {token_id}")
        return token

    def render(self, messages: Sequence[Message]) -> str:
        """The model's text of a conversation, ready for its answer. Each image and each video is one marker."""
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

    def _wants_lists(self) -> bool:
        """Some templates take content as a list of parts, some as one string: ask with a probe."""
        if self._template is None:
            return True
        probe = "fovea-probe-7f3a"
        try:
            text = self._apply([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except InvalidRequest:
            return False
        return probe in text and "{'type'" not in text


def _template_file(folder: Path) -> str | None:
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text()
    for name in ("chat_template.json", "processor_config.json"):
        path = folder / name
        if path.is_file():
            template = read_json(path).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def _eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's, else the model's, and always the tokenizer's own."""
    found: set[int] = set()
    sources = [read_json(folder / "generation_config.json").get("eos_token_id")]
    sources += [getattr(config, "eos_token_id", None), getattr(config.text_config, "eos_token_id", None)]
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
            break
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
