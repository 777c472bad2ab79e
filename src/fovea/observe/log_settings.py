"""Settings of logs."""

from __future__ import annotations

from dataclasses import dataclass

from fovea.core.settings import check_settings, setting

FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Logs of a server or gateway."""

    log_format: str = setting(
        "text", "Form of the log: lines of text, or a JSON object per line.", choices=FORMATS
    )
    slow_request_s: float = setting(
        30.0,
        "A request that takes so many seconds is logged as slow, with its stages and reasons. 0: none is.",
        low=0,
        high=86400,
    )
    slow_ttft_s: float = setting(
        10.0,
        "A request whose first token takes so many seconds is logged as slow. 0: none is.",
        low=0,
        high=86400,
    )

    def __post_init__(self) -> None:
        check_settings(self)
