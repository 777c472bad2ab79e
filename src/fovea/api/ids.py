"""Ids of answers and of their parts."""

from __future__ import annotations

import uuid
from collections.abc import Callable

NewId = Callable[[str], str]
"""Returns a new id. Its argument is the prefix that tells the kind, such as "msg"."""


def new_id(kind: str) -> str:
    """A new random id."""
    return f"{kind}_{uuid.uuid4().hex}"
