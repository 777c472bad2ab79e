"""How an answer has ended: the part of it that is known only at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fovea.core.types import Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer.

    reason: finish reason of the choice, such as "stop", "length" or "content_filter"; None: none was named.
    stop: the stop string or the token that ended the answer; None: another end.
    usage: token counts; None: unknown.
    extension: the `fovea` field of the answer; None: there is none.
    """

    reason: str | None = None
    stop: str | int | None = None
    usage: Usage | None = None
    extension: dict[str, Any] | None = None
