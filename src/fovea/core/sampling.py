"""Sampling parameters: one frozen value per request, checked when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
"""Most choices of a request, as in OpenAI's API. Each holds a place in the engine's queue."""
MAX_REPORTED = 16 * MAX_TOP_LOGPROBS
"""Likely tokens that a request may want to know at one position, all choices together: they are kept until
the answer is complete, and each takes about 100 bytes of it."""
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 64
MAX_BAD_CHARACTERS = 16_384
"""Most characters of all bad words together, which are tokenized."""
LOWEST_LOGPROB = -9999.0
"""Logprob of a token that the model considers impossible, as in OpenAI's API: JSON has no -inf."""
OFF = {"top_k": 0, "seed": None, "max_tokens": None}
"""Parameters that vLLM or llama.cpp turns off with -1, and their values here."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):  # NaN is in no range
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"{name} must be in {bracket}{low:g}, {high:g}], got {_brief(value)}", param=name
        )


def _brief(value: object) -> str:
    """A value as an error shows it. Python refuses to write whole numbers of more than 4,300 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 64 else f"{text[:64]}..."


def _whole(name: str, value: float, low: int, high: int) -> None:
    _within(name, value, low, high)
    if not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=name)


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for type checkers. A test compares the two."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    n: int
    logprobs: bool
    top_logprobs: int
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    skip_special_tokens: bool
    format: AnswerFormat | None
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    include_stop_str_in_output: bool
    prompt_logprobs: int | None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with OpenAI's semantics, and the extensions that serving engines share.

    temperature: 0 is greedy. [0, 2].
    top_p: probability mass of the nucleus. (0, 1].
    top_k: sample from the k most likely tokens; 0 or -1 turns it off. [-1, 2**31].
    min_p: least probability relative to that of the most likely token. [0, 1].
    repetition_penalty: logits of all tokens of prompt and answer are divided by it, or multiplied if
        negative. [0.01, 10]; a number much closer to 0 would make logits infinite.
    presence_penalty: subtracted once from the logit of each generated token. [-2, 2].
    frequency_penalty: subtracted from the logit of a generated token per occurrence. [-2, 2].
    seed: the same seed gives the same text, whatever else is in the batch (up to rounding on torch and CUDA).
        None or -1: a random seed.
    stop: strings that end the text; the answer does not include them. At most 16 of at most 4,096 characters.
    stop_token_ids: token ids that end the text; their text is not shown. At most 64.
    max_tokens: longest answer. None or -1: as many tokens as the context has room for.
    min_tokens: the text does not end before this many tokens.
    n: number of independent choices. [1, 128].
    logprobs: whether to report the logprob of each token.
    top_logprobs: number of the most likely tokens to report for each position. [0, 20].
    logit_bias: token id -> value in [-100, 100] that is added to its logit. At most 1024 entries.
    ignore_eos: the model's own end tokens do not end the text; stop, stop_token_ids and max_tokens do.
    skip_special_tokens: special tokens are left out of the text.
    format: the form that the answer must have, such as JSON of a schema. None: any text. An answer that
        reaches max_tokens, or a stop string, ends before it is complete.
    allowed_token_ids: the only token ids that the answer may contain, its end tokens included. Empty: all.
        At most 4096. If `format` allows none of them, `format` decides; so it does with bad_words.
    bad_words: texts whose tokens never occur in the answer one after the other, as they are and after a
        space. The same letters may occur as other tokens. At most 64 of at most 4,096 characters.
    include_stop_str_in_output: the stop string that ends an answer is part of it.
    prompt_logprobs: number of the most likely tokens to report for each position of the prompt, beside the
        prompt's own; the whole prompt is computed then, whatever is cached. None: none. [0, 20].

    Raises InvalidRequest that names the wrong field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    format: AnswerFormat | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, off in OFF.items():
            if getattr(self, name) == -1:
                object.__setattr__(self, name, off)
        _within("temperature", self.temperature, 0, 2)
        _within("top_p", self.top_p, 0, 1, open_low=True)
        _whole("top_k", self.top_k, 0, 2**31)
        _within("min_p", self.min_p, 0, 1)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _whole("min_tokens", self.min_tokens, 0, 2**31)
        _whole("n", self.n, 1, MAX_CHOICES)
        _whole("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        if self.format is not None and not isinstance(self.format, AnswerFormat):
            raise InvalidRequest(
                f"format takes an AnswerFormat, not {type(self.format).__name__}", param="format"
            )
        self._check_lengths()
        self._check_stops()
        self._check_ids()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        top = max(self.top_logprobs, self.prompt_logprobs or 0)
        if self.n * top > MAX_REPORTED:
            name = "top_logprobs" if self.top_logprobs == top else "prompt_logprobs"
            raise InvalidRequest(
                f"n ({self.n}) times {name} ({top}) is {self.n * top}; accepted: at most {MAX_REPORTED}",
                param=name,
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

    def _check_stops(self) -> None:
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            texts: Any = getattr(self, name)
            if isinstance(texts, str):
                raise InvalidRequest(f"{name} takes several strings: ({texts!r},), not {texts!r}", param=name)
            usable = all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
            if len(texts) > most or not usable:
                raise InvalidRequest(
                    f"{name} takes up to {most} non-empty strings, "
                    f"each of up to {MAX_STOP_LENGTH} characters",
                    param=name,
                )
        if sum(map(len, self.bad_words)) > MAX_BAD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words takes up to {MAX_BAD_CHARACTERS} characters in all", param="bad_words"
            )

    def _check_ids(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias takes up to {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**31)
            _within(f"logit_bias[{token}]", bias, -100, 100)
        for name, most in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_ALLOWED_IDS)):
            ids = getattr(self, name)
            if len(ids) > most:
                raise InvalidRequest(f"{name} takes up to {most} ids", param=name)
            for token in ids:
                _whole(name, token, 0, 2**31)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
