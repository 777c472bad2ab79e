"""The bundled model's tokenizer and templates without transformers, whose import takes a second."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer

from fovea.engine.files import read_json

MARK = "\U0010fffc"


class PlainTokenizer:
    """A tokenizer with the interface of transformers, read from tokenizer.json and tokenizer_config.json.

    It has the part of their interface that `ChatTokenizer` uses, and the part of their Jinja that the
    template of the bundled model uses. Other templates need a tokenizer of transformers.
    """

    chat_template = None

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        self._compile = lru_cache(4)(environment.from_string)
        config = read_json(folder / "tokenizer_config.json")
        self.bos_token: str | None = config.get("bos_token")
        self.eos_token: str = config["eos_token"]
        self.eos_token_id: int | None = self.convert_tokens_to_ids(self.eos_token)

    @property
    def backend_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` itself."""
        return self._tokenizer

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of ids. clean_up_tokenization_spaces: always false here."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def convert_tokens_to_ids(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, chat_template: str, tokenize: bool, **variables: Any
    ) -> str:
        """Return messages as text.

        tokenize: always false here.
        variables: of the template, beside the messages.
        """
        render = self._compile(chat_template).render
        if not variables.get("continue_final_message"):
            return render(messages=messages, **variables)
        # The mark shows where the last message ends. It also keeps white space before it from being trimmed.
        last = {**messages[-1], "content": _with_mark(messages[-1]["content"])}
        text, mark, _ = render(messages=[*messages[:-1], last], **variables).rpartition(MARK)
        if not mark:
            raise jinja2.TemplateError("the template does not repeat the last message as it is")
        return text


def _with_mark(content: Any) -> Any:
    """The content of a message with MARK at its end."""
    if isinstance(content, str):
        return content + MARK
    return [*content, {"type": "text", "text": MARK}]


def _to_json(value: Any, **_: Any) -> str:
    """JSON as transformers' templates get it. Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False)
