"""Settings of scheduling and admission, of visual tokens, and of speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.settings import check_settings, setting
from fovea.engine.config.memory import MOST_MIB
from fovea.engine.config.model import QUANTIZATIONS
from fovea.engine.visual_budget.methods import PARAM, find_method, parse_visual_tokens

POLICY_NAMES = ("dual", "fcfs", "priority", "detail")
WHEN_FULL = ("wait", "refuse")
WHEN_LATE = ("refuse", "degrade", "wait")


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Scheduling and admission."""

    policy: str = setting(
        "dual",
        "Which waiting request joins first: dual (text, follow-ups and known images do not wait behind new "
        "images), fcfs (order of arrival), priority (the request's own, then dual), detail (requests of "
        "similar visual cost together).",
        choices=POLICY_NAMES,
    )
    max_passes: int = setting(
        32, "How many later requests may join before one that waits.", low=0, high=1 << 20
    )
    pace: float = setting(
        2.5,
        "Longest step while prompts or images are computed beside decodes, in multiples of a step that only "
        "decodes. 0: no bound.",
        low=1,
        high=1000,
        or_zero=True,
    )
    target_itl_ms: int = setting(
        0,
        "Longest gap between tokens in milliseconds, kept by the percentage of gaps in target_percentile. It "
        "bounds steps beside pace, and the number of answers that are computed at a time. 0: none.",
        low=0,
        high=1 << 20,
    )
    target_ttft_ms: int = setting(
        0,
        "Longest time to the first token in milliseconds, kept by the percentage of requests in "
        "target_percentile. A request that would be later is treated as when_late says. 0: none.",
        low=0,
        high=1 << 24,
    )
    target_percentile: float = setting(
        95.0, "Percentage of gaps and of first tokens that should keep their target.", low=1, high=99.9
    )
    when_late: str = setting(
        "refuse",
        "Treatment of a request whose first token is expected after target_ttft_ms: refuse (429 with the "
        "figures), degrade (fewer visual tokens if that is enough, otherwise refuse), or wait.",
        choices=WHEN_LATE,
    )
    max_running: int = setting(64, "Sequences that share a step.", low=1, high=4096)
    max_step_tokens: int = setting(
        2048, "Tokens computed per step: decodes first, chunks of prompts in the rest.", low=1, high=1 << 20
    )
    max_step_visual_tokens: int = setting(
        4096,
        "Visual tokens of the images that a step works on. One image is always accepted.",
        low=1,
        high=1 << 20,
    )
    max_draft_tokens: int = setting(
        16,
        "Most tokens that one step computes for an answer in addition to one, because its form leaves no "
        "choice about them, such as the keys of a JSON schema. 0: one step each.",
        low=0,
        high=256,
    )
    max_queue: int = setting(
        256, "Requests that may wait; more are refused with 429. 0: no bound.", low=0, high=1 << 20
    )
    when_full: str = setting(
        "wait",
        "Treatment of a request whose KV or pixels do not fit beside the requests in flight: wait, or "
        "refuse with 429.",
        choices=WHEN_FULL,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def max_in_flight(self) -> int:
        """Answers that may run or wait; 0: no bound."""
        return self.max_running + self.max_queue if self.max_queue else 0


DETAIL_POLICY_NAMES = ("full", "keywords")


def _visual_tokens(text: str) -> str:
    _check_method("visual_tokens", lambda: parse_visual_tokens(text))
    return ""


def _degrade_by(text: str) -> str:
    if text != "detail":
        _check_method("degrade_by", lambda: find_method(text))
    return ""


def _check_method(name: str, read: Callable[[], object]) -> None:
    """Raise ConfigError if `read` refuses the setting.

    The message then names the setting, not the parameter.
    """
    try:
        read()
    except InvalidRequest as error:
        raise ConfigError(f"{name}: {error.message.removeprefix(f'{PARAM}: ')}", param=name) from None


@dataclass(frozen=True, slots=True)
class VisualSettings:
    """Detail levels and visual tokens of images whose request does not choose them."""

    detail_policy: str = setting(
        "full",
        "The meaning of detail=auto: full (the model's own resolution) or keywords (by the words of the "
        "question).",
        choices=DETAIL_POLICY_NAMES,
    )
    degrade_from: float = setting(
        0.0,
        "Load, as a share of what the engine can hold, from which detail=auto loses a level; half way from "
        "there to 1 it loses another one. 0: never.",
        low=0,
        high=1,
    )
    degrade_by: str = setting(
        "detail",
        "What is reduced under load: detail (the level), or visual tokens, by a method of visual_tokens.",
        check=_degrade_by,
        words="detail, or a method",
    )
    visual_tokens: str = setting(
        "off",
        "How many visual tokens an image keeps if its request does not say: off (all of them), METHOD:SHARE "
        "(relevance:0.5), relevance:auto (as many as the question needs), or a preset: document (all), "
        "general, fast.",
        check=_visual_tokens,
        words="off, METHOD:SHARE, or a preset",
    )

    def __post_init__(self) -> None:
        check_settings(self)


DRAFTERS = ("prompt", "hints", "answers", "layer", "model")
"""The drafters, in the order of preference among equals."""


def parse_speculate(text: str) -> tuple[str, ...]:
    """Return the names of drafters that a setting or request names. Raises InvalidRequest for another."""
    if text in ("auto", "off"):
        return DRAFTERS if text == "auto" else ()
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if any(name not in DRAFTERS for name in names):
        raise InvalidRequest(
            f"speculate is {text!r}; accepted: auto, off, or some of {', '.join(DRAFTERS)}", param="speculate"
        )
    return names


def _speculate(text: str) -> str:
    try:
        parse_speculate(text)
    except InvalidRequest as error:
        raise ConfigError(error.message, param="speculate") from None
    return ""


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Speculation: drafts, the expected tokens of an answer of which a step verifies several."""

    speculate: str = setting(
        "auto",
        "Sources of drafts, the expected tokens that one step verifies together: prompt (repetitions of "
        "the prompt), hints (a prediction in the request, earlier answers about the image), answers (earlier "
        "answers to the same client), layer (draft_layer), model (draft_model), or several of them with "
        "commas. auto: all that there are, as long as looking for drafts takes at most 2% of a step. off: "
        "none. Answers are the same, see docs/speculation.md.",
        check=_speculate,
        words="auto, off, or drafters",
    )
    speculative_tokens: int = setting(5, "Most drafts of an answer that a step verifies.", low=1, high=32)
    answer_cache_mib: int = setting(
        16,
        "Ceiling of the texts of earlier answers, in MiB; the drafters hints and answers have half each. "
        "They are kept apart by client and cache_salt. 0: none.",
        low=0,
        high=MOST_MIB,
    )
    draft_layer: str = setting(
        "auto",
        "A trained layer that drafts from the model's own states: the folder of an EAGLE-3 checkpoint (from "
        "the hub it must be downloaded first). auto: the folder eagle3 in the model's folder, or the MTP "
        "layer in the model's checkpoint. off: none.",
    )
    draft_model: str = setting(
        "",
        "A smaller model with the same tokenizer, which drafts: a folder, a GGUF file or a hub id. Empty: "
        "none.",
        words="a model",
    )
    draft_quantization: str = setting("none", "As quantization, for the draft model.", choices=QUANTIZATIONS)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that may be used."""
        return parse_speculate(self.speculate)
