"""The form of log lines and its settings: text for people, or a JSON object per line for programs."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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


TEXT = "%(asctime)s %(levelname).1s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object.

    A record with the attribute `fields` (a mapping) gets these as keys of the object, and the attribute
    `event` as its message.
    """

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            values |= {name: value for name, value in fields.items() if name not in values}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            values["stack"] = record.stack_info
        return json.dumps(values, default=str)


def formatter(form: str) -> logging.Formatter:
    """Return the formatter of a setting `log_format`: "text" or "json"."""
    return JsonFormatter() if form == "json" else logging.Formatter(TEXT)
