"""The error tree: every leaf has its status, its kind and a stable code."""

from __future__ import annotations

import inspect
import re

import pytest

from fovea.core import errors
from fovea.core.errors import FoveaError, InvalidImage, Overloaded

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, FoveaError)]


def make(kind: type[FoveaError]) -> FoveaError:
    return kind("what was wrong", retry_after=1.0) if kind is Overloaded else kind("what was wrong")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_is_drawn_in_the_tree_with_its_status(kind: type[FoveaError]) -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if re.search(rf"\b{kind.__name__}\b", line)]
    assert lines, f"{kind.__name__} is missing in the drawing"
    drawn = re.search(r"\b(\d{3})\b", lines[0])
    if drawn:
        assert int(drawn[1]) == kind.status


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_carries_message_code_and_place(kind: type[FoveaError]) -> None:
    error = make(kind)
    assert "what was wrong" in str(error)
    assert re.fullmatch(r"[a-z_]+", error.code)
    assert re.fullmatch(r"[a-z_]+_error", error.kind)
    assert error.param is None
    assert 400 <= error.status < 600


def test_an_image_error_names_its_image_once() -> None:
    plain = InvalidImage("too small", param="p", code="tiny")
    placed = plain.at(2, "messages[0].content[1]")
    assert (str(placed), placed.index, placed.param, placed.code) == (
        "image 2: too small",
        2,
        "messages[0].content[1]",
        "tiny",
    )
    assert str(placed.at(3)) == "image 3: too small"
    assert placed.at(3).param == "messages[0].content[1]"


def test_overload_says_when_to_come_back() -> None:
    assert Overloaded("full", retry_after=2.5).retry_after == 2.5
