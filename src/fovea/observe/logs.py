"""The form of log lines: text for people, or a JSON object per line for programs that collect logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

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
