"""Every error of the tree has a status, a kind and a stable code."""

from __future__ import annotations

import inspect
import re

import pytest

from fovea.core import errors
from fovea.core.errors import FoveaError, InvalidImage, Overloaded

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FoveaError)]


def make(kind: type[FoveaError]) -> FoveaError:
    message = "what was wrong"
    return kind(message, retry_after=1.0) if kind is Overloaded else kind(message)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_is_drawn_in_the_tree_with_its_status(kind: type[FoveaError]) -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if re.search(rf"\b{kind.__name__}\b", line)]
    assert lines, f"{kind.__name__} is missing in the drawing"
    status = re.search(r"\b(\d{3})\b", lines[0])
    if status:
        assert int(status[1]) == kind.status


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_carries_message_code_and_place(kind: type[FoveaError]) -> None:
    error = make(kind)
    assert "what was wrong" in str(error)
    assert re.fullmatch(r"[a-z_]+", error.code)
    assert re.fullmatch(r"[a-z_]+_error", error.kind)
    assert error.param is None
    assert 400 <= error.status < 600


def test_an_image_error_names_its_image_once() -> None:
    error = InvalidImage("too small", param="p", code="tiny")
    indexed = error.at(2, "messages[0].content[1]")
    assert (str(indexed), indexed.index, indexed.param, indexed.code) == (
        "image 2: too small",
        2,
        "messages[0].content[1]",
        "tiny",
    )
    assert str(indexed.at(3)) == "image 3: too small"
    assert indexed.at(3).param == "messages[0].content[1]"


def test_overloaded_carries_retry_after() -> None:
    assert Overloaded("full", retry_after=2.5).retry_after == 2.5
