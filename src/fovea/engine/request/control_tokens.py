"""The control tokens of a tokenizer, and the forms that keep them apart from text that a client wrote.

A sealed tokenizer is a copy that knows its control tokens by their sealed forms only.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fovea.core.errors import CheckpointError

_PLANE = 0xF0000
_NONCE = 8
"""Length of the random part of a sealed form, in characters of 16 bits each."""
_NEVER = "(?!)"


class ControlTokens:
    """The added tokens of a tokenizer that only the chat template may write.

    A control token written by the chat template begins or ends a turn. If the same characters in a
    message did so, too, a user could forge a turn of the system. So the template's own control tokens are
    *sealed*: each is replaced by a form of private-use characters that contains 128 random bits. In a
    sealed text, only a sealed form is a control token; the plain characters of one are text.

    These are its special tokens, `marker_ids` (the tokens of images and videos), `eos_ids`, and other added
    tokens that the template writes (Qwen's <think>). The last kind is ordinary text of the model's own
    answers, so messages of the assistant may contain it: `answer_words`.

    characters: the characters that tell control tokens from words (< | >). Text without them contains no
        control token.
    """

    def __init__(self, added: dict[int, Any], template: str, fixed_ids: frozenset[int]) -> None:
        """added: the tokenizer's added tokens by id, with `content` and `special`.

        template: source of the chat template.
        fixed_ids: ids that are control tokens although the tokenizer does not call them special.
        """
        nonce = self._nonce = "".join(chr(_PLANE + secrets.randbelow(0xFFFE)) for _ in range(_NONCE))
        self.ids: dict[str, int] = {}
        self._answer: list[str] = []
        for token_id, token in added.items():
            content = token.content
            is_fixed = token.special or token_id in fixed_ids
            if content and (is_fixed or (content in template and not _is_word(content))):
                self.ids[content] = token_id
                if not is_fixed:
                    self._answer.append(content)
        self.forms = {content: f"{nonce}{chr(_PLANE + i)}" for i, content in enumerate(self.ids)}
        self._contents = {form: content for content, form in self.forms.items()}
        self._id_set = frozenset(self.ids.values())
        self.pattern = search_pattern(self.ids)
        self.any_case = re.compile(self.pattern.pattern, re.IGNORECASE)
        self.answer_words = search_pattern(self._answer)
        self._form = re.compile(f"{nonce}.", re.DOTALL)
        self.characters = frozenset().union(*(_marks(content) for content in self.ids))
        folded = [content.casefold() for content in self.ids]
        self._heads = frozenset(word[:at] for word in folded for at in range(1, len(word)))
        self._tails = frozenset(word[at:] for word in folded for at in range(1, len(word)))
        self._longest = max(map(len, folded), default=0)

    def seal(self, text: str) -> str:
        """Replace every control token of a text by its sealed form."""
        return self.pattern.sub(lambda match: self.forms[match[0]], text)

    def unseal(self, text: str) -> str:
        """Replace every sealed form by the token's own characters."""
        return self._form.sub(lambda match: self._contents.get(match[0], ""), text)

    def is_sealed(self, text: str) -> bool:
        """Whether a text has a sealed form."""
        return self._nonce in text

    def relax(self, text: str) -> str:
        """Return a sealed text without seals if its plain characters say the same, else as it is."""
        plain = self.unseal(text)
        return plain if self.seal(plain) == text else text

    def plain_ids(self, text: str) -> list[int]:
        """Return the ids of the control tokens that a text contains as plain characters, in order."""
        return [self.ids[content] for content in self.pattern.findall(text)]

    def sealed_ids(self, text: str) -> list[int]:
        """Return the ids of the sealed forms in a text, in order."""
        forms = self._form.findall(text)
        return [self.ids[self._contents[form]] for form in forms if form in self._contents]

    def among(self, ids: Iterable[int]) -> list[int]:
        """Return those of the ids that are control tokens, in order."""
        return [token for token in ids if token in self._id_set]

    def fragments(self, text: str) -> tuple[int, int]:
        """Return the two ends of a text that could become part of a control token beside other text.

        The first number is the index after the text's beginning that could be the end of a control token; 0:
        there is none. The second one is the index at which the text's end begins that could be the beginning
        of a control token; the length of the text: there is none. Case and outer whitespace are ignored,
        because the template may change them.
        """
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        head = tail = 0
        for size in range(1, min(self._longest, end - begin + 1)):
            if text[begin : begin + size].casefold() in self._tails:
                head = size
            if text[end - size : end].casefold() in self._heads:
                tail = size
        return (begin + head if head else 0), (end - tail if tail else len(text))


def search_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the leftmost of the words, and the longest of those that begin there.

    Words share their beginnings in the pattern, so the time of a search does not grow with their number.
    Raises CheckpointError if the words are nested too deeply for Python's regular expressions.
    """
    words = sorted(set(words))
    try:
        return re.compile(_alternatives(words) if words else _NEVER)
    except (RecursionError, re.error, OverflowError) as error:
        raise CheckpointError(
            f"the tokenizer's {len(words)} added tokens cannot be searched for: {type(error).__name__}"
        ) from error


def _alternatives(words: Sequence[str]) -> str:
    """Return the expression of sorted words; "" among them makes the others optional."""
    groups: dict[str, list[str]] = {}
    for word in words:
        if word:
            groups.setdefault(word[0], []).append(word)
    branches = []
    for group in groups.values():
        # Sorted words have the beginning in common that the first and the last of them share.
        first, last = group[0], group[-1]
        size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        rest = [word[size:] for word in group]
        branches.append(re.escape(first[:size]) + (_alternatives(rest) if any(rest) else ""))
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}"


def _is_word(content: str) -> bool:
    """Whether a token is ordinary text that templates contain, as a word or a line break."""
    return content.isspace() or content.replace(" ", "").isalnum()


def _marks(content: str) -> frozenset[str]:
    """Return a token's characters that are neither letters, digits nor space; else all of its characters."""
    marks = frozenset(char for char in content if not char.isalnum() and not char.isspace())
    return marks or frozenset(content)


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
    """Return the copy, or None, with a warning in the log, if the ids of its control tokens differ.

    Every rule of the tokenizer stays: normalisation, merges, whitespace beside added tokens, start
    tokens. Only the names of the control tokens change, so the plain characters of one are tokenized as
    any other text.
    """
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
