"""The package `instructor`, which reads answers as objects of pydantic models."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from instructor import Mode

from tests.clients.support import (
    BLUE_STAR,
    COUNT,
    ITEM,
    MODEL,
    TRIANGLES,
    Case,
    Count,
    Item,
    Server,
    user_asks,
)

FORMS = pytest.mark.parametrize(
    ("case", "form", "value"), [(COUNT, Count, TRIANGLES), (ITEM, Item, BLUE_STAR)]
)


def request(case: Case, form: type[Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [user_asks(case)],
        "temperature": 0,
        "response_model": form,
        "max_retries": 0,
    }


def client(server: Server, mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0), mode=mode)


@FORMS
def test_json_schema(server: Server, case: Case, form: type[Any], value: Any) -> None:
    """the mode JSON_SCHEMA gives the right object of a pydantic model"""
    answer = client(server, Mode.JSON_SCHEMA).chat.completions.create(**request(case, form))
    assert answer.model_dump() == value.model_dump()


def test_json(server: Server) -> None:
    """the mode JSON gives an object of a pydantic model

    This mode explains the schema in the prompt. fovea-tiny has not learnt to read schemas, so that its answer
    may be wrong.
    """
    answer = client(server, Mode.JSON).chat.completions.create(**request(COUNT, Count))
    assert isinstance(answer, Count)


@FORMS
def test_tools(server: Server, case: Case, form: type[Any], value: Any) -> None:
    """the mode TOOLS gives an object of a pydantic model"""
    answer = client(server, Mode.TOOLS).chat.completions.create(**request(case, form))
    assert isinstance(answer, type(value))


def test_partial(server: Server) -> None:
    """`create_partial` streams an object that grows to the right one"""
    chat = client(server, Mode.JSON_SCHEMA).chat.completions
    *_, last = chat.create_partial(**request(ITEM, Item))
    assert last.model_dump() == BLUE_STAR.model_dump()
