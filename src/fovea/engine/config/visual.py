"""Settings of the visual budget: detail levels of images, and the number of visual tokens that they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fovea.core.errors import ConfigError, InvalidRequest
from fovea.core.settings import check_settings, setting
from fovea.engine.visual_budget.methods import PARAM, find_method, parse_visual_tokens

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
        "Load, as a share of the engine's room, from which detail=auto loses a level; half way from there "
        "to 1 it loses another one. 0: never.",
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
        "(relevance:0.5), or a preset: document (all), general, fast.",
        check=_visual_tokens,
        words="off, METHOD:SHARE, or a preset",
    )

    def __post_init__(self) -> None:
        check_settings(self)
