"""Log probabilities in the forms of the APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fovea.core.types import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log probabilities in the form of chat completions. The bytes of all tokens together are the text."""
    content = [
        {
            **_token(entry.text, entry.logprob, hidden=entry.hidden),
            "top_logprobs": [_token(text, logprob) for _, text, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob], length: int) -> dict[str, Any]:
    """Log probabilities in the form of text completions.

    length: of the choice's text, in characters. Tokens that a stop string has cut off have this place.
    """
    return {
        "tokens": [token_text(entry.text) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _by_text(entry, entry.logprob) for entry in entries
        ],
        "text_offset": [min(entry.offset, length) for entry in entries],
    }


def _by_text(entry: TokenLogprob, own: float) -> dict[str, float]:
    """The most likely tokens of a place and its own one by their texts, most likely first.

    Several tokens may have one text, such as parts of characters. The most likely one of them counts.
    """
    top: dict[str, float] = {}
    for _, text, logprob in (*entry.top, (entry.id, entry.text, own)):
        top.setdefault(token_text(text), logprob)
    return top


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt, in vLLM's form: by token id, the most likely ones and the prompt's own.

    The first token, and tokens of images, have null.
    """
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    tokens = {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": token_text(text)}
        for rank, (token, text, logprob) in enumerate(entry.top, 1)
    }
    own = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": token_text(entry.text)}
    return {str(entry.id): own, **tokens} | {str(entry.id): own}


def _token(text: str, logprob: float | None, *, hidden: bool = False) -> dict[str, Any]:
    return {"token": token_text(text), "logprob": logprob, "bytes": [] if hidden else list(token_bytes(text))}


def token_bytes(text: str) -> bytes:
    """The bytes of a token's text. Surrogates in it stand for bytes that are not UTF-8; see TokenLogprob."""
    return text.encode("utf-8", "surrogateescape")


def token_text(text: str) -> str:
    """A token's text as JSON can hold it: bytes that are not UTF-8 become replacement characters."""
    return token_bytes(text).decode("utf-8", "replace")
