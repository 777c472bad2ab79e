"""A copy of a tokenizer that knows its control tokens by their sealed forms only.

Every rule of the tokenizer stays: normalisation, merges, whitespace beside added tokens, start tokens. Only
the names of the control tokens change, so the plain characters of one are tokenized as any other text.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from fovea.engine.request.control_tokens import ControlTokens

log = logging.getLogger("fovea.engine")


class SealedTokenizer:
    """Encodes sealed text. The copy is built when it is first needed, which takes less than a second.

    backend: the `tokenizers.Tokenizer` that is copied; None: there is no copy.
    """

    def __init__(self, backend: Any, controls: ControlTokens) -> None:
        self._backend = backend
        self._controls = controls
        self._copy: Any = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int] | None:
        """Return the ids of a sealed text, or None if this tokenizer cannot be copied."""
        with self._lock:
            if self._copy is None and self._backend is not None:
                self._copy = sealed_copy(self._backend, self._controls)
                if self._copy is None:
                    self._backend = None
        if self._copy is None:
            return None
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = self._copy.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def sealed_copy(backend: Any, controls: ControlTokens) -> Any:
    """Return the copy, or None, with a warning in the log, if the ids of its control tokens differ."""
    from tokenizers import Tokenizer

    content = json.loads(backend.to_str())
    rename_tokens(content, controls.forms)
    try:
        copy = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        log.warning("messages with control tokens will be refused: no copy of the tokenizer: %s", error)
        return None
    moved = [name for name, form in controls.forms.items() if copy.token_to_id(form) != controls.ids[name]]
    if moved:
        log.warning("messages with control tokens will be refused: the copy gives %r another id", moved[0])
        return None
    return copy


def rename_tokens(content: dict[str, Any], forms: Mapping[str, str]) -> None:
    """Rename tokens in the JSON of a tokenizer: in the vocabulary, in the merges, and as added tokens.

    A vocabulary that contains a control token could otherwise make it from plain characters (Unigram).
    """
    content["truncation"] = content["padding"] = None
    for token in content.get("added_tokens") or ():
        if token["content"] in forms:
            token["content"], token["normalized"] = forms[token["content"]], False
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {forms.get(word, word): token_id for word, token_id in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[forms.get(word, word), score] for word, score in vocabulary]
    if model.get("unk_token") in forms:
        model["unk_token"] = forms[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, prefix, forms)]


def _makes(pair: str | list[str], prefix: str, forms: Mapping[str, str]) -> bool:
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in forms or right in forms or left + right.removeprefix(prefix) in forms
