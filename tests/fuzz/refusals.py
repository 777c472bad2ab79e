"""The one outcome of wrong data that is not a finding: an error of Fovea. The last ones are remembered.

Without coverage, a mutator takes a new kind of refusal as a sign that an input reached new code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fovea.api import errors
from fovea.core.errors import FoveaError

LONGEST_MESSAGE = 2000
"""Longest message of an error, in characters. A server's answer shows fewer, see `api.bodies.errors`."""
_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
_seen: list[str] = []


@contextmanager
def refusals() -> Iterator[None]:
    """Accept any FoveaError of the block whose message is short and not empty, also for a program or a log.

    A server's answer to it has to keep the shorter bounds that the server promises to clients.
    """
    try:
        yield
    except FoveaError as error:
        size = len(error.message)
        if not 0 < size < LONGEST_MESSAGE:
            raise AssertionError(f"a message of {size} characters") from error
        answer = errors.error_body(error)["error"]
        if not 0 < len(answer["message"]) <= errors.LONGEST_MESSAGE:
            raise AssertionError(f"an answer of {len(answer['message'])} characters") from error
        if len(answer["param"] or "") > errors.LONGEST_PARAM:
            raise AssertionError(f"a param of {len(answer['param'])} characters") from error
        note(f"{type(error).__name__} {error.code} {_VARIABLE.sub('', error.message)[:80]}")


def text_of(data: bytes) -> str:
    """The bytes as text. Halves of surrogate pairs stay, as JSON can hold them; other wrong bytes do not."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def note(outcome: str) -> None:
    """Remember an outcome of the current run, for example which branch of a format was read."""
    _seen.append(outcome)


def take() -> tuple[str, ...]:
    """Return the outcomes since the last call."""
    outcomes = tuple(_seen)
    _seen.clear()
    return outcomes
