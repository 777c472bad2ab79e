"""Errors of chat templates tell clients what the template's author wrote, and no internals."""

from __future__ import annotations

import pytest

from fovea.core.errors import CheckpointError, InvalidRequest
from fovea.core.types import Message, TextPart
from fovea.engine.request.chat_template import LONGEST_REASON
from fovea.engine.request.tokenizer import ChatTokenizer
from tests.support.checkpoints import QWEN_TEMPLATE, tokenizer


def chat(template: str) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(QWEN_TEMPLATE), template, eos_ids=frozenset({2}))


@pytest.mark.parametrize(
    ("template", "says", "never"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot write these messages", "unsafe"),
        ("{{ messages[0]['content'][0]['text'] + 1 }}", "cannot write these messages", "concatenate"),
        ("{{ messages[9]['secret'] }}", "cannot write these messages", "secret"),
        ("{{ messages[0].content.nothing.more }}", "cannot write these messages", "more'"),
        ("{{ 1 // 0 }}", "cannot write these messages", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot write these messages", "recursion"),
        (
            "{{ raise_exception('no ' + 'o' * 5000) }}",
            "refuses these messages: no o",
            "o" * (LONGEST_REASON + 1),
        ),
        ("{{ 'x' * 3000000 }}", "made 3000000 characters of 2", "xxx"),
    ],
)
def test_a_failing_template_tells_clients_no_internals(template: str, says: str, never: str) -> None:
    """Clients got the text of Python's TypeError or KeyError, of any length."""
    words = chat(template)
    with pytest.raises(InvalidRequest, match=says) as caught:
        words.render([Message("user", (TextPart("hi"),))])
    assert never not in caught.value.message


def test_a_template_that_is_not_jinja_ends_the_start() -> None:
    """It was found at the first request, which got 400."""
    with pytest.raises(CheckpointError, match="the chat template is not Jinja: line 2"):
        chat("{{ messages }}\n{% if %}")
