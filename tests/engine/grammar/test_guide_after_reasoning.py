"""Grammars that begin behind the model's reasoning, and the number of tokens in which it reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest
from fovea.engine.grammar.compiler import Grammar
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.guide import Guide, Guides
from fovea.engine.grammar.trial import END, byte_vocabulary
from fovea.engine.request.answer import ReasoningCount
from tests.support.thorough import examples

MARK = tuple(b"</t>")
THOUGHT = list(b"hm {")
ANSWER = list(b"yes")


def grammar(pattern: str = "yes|no{1,3}") -> Grammar:
    return Grammar(compile_format(AnswerFormat.regex(pattern), byte_vocabulary()))


def guide(pattern: str = "yes|no{1,3}", after: tuple[int, ...] = MARK) -> Guide:
    return grammar(pattern).guide(after)


def allowed(place: Guide) -> set[str]:
    """The characters that may come next by the mask of the grammar itself."""
    mask = place.matcher.compute_bitmask()
    return {chr(token) for token in range(128) if mask[token // 8] >> token % 8 & 1}


def test_without_reasoning_the_grammar_begins_with_the_answer() -> None:
    place = guide(after=())
    assert not place.waits
    place.read([])
    assert allowed(place) == {"y", "n"}
    with pytest.raises(InvalidRequest, match="failed at token"):
        place.read(THOUGHT)


def test_all_tokens_are_allowed_while_the_model_reasons() -> None:
    place = guide()
    for length in range(len(THOUGHT) + 1):
        place.read(THOUGHT[:length])
        assert place.waits
        assert not place.ended
        assert place.forced == []


def test_the_grammar_begins_behind_the_mark() -> None:
    place = guide()
    place.read([*THOUGHT, *MARK[:-1]])
    assert place.forced == []
    place.read([*THOUGHT, *MARK])
    assert not place.waits
    assert allowed(place) == {"y", "n"}
    place.read([*THOUGHT, *MARK, ord("y")])
    assert place.forced == list(b"es")
    with pytest.raises(InvalidRequest, match="failed at token"):
        place.read([*THOUGHT, *MARK, *b"yo"])


def test_reasoning_and_answer_in_one_step() -> None:
    """Drafts may bring the mark and what follows it at once."""
    place = guide()
    place.read([*THOUGHT, *MARK, *ANSWER])
    assert place.ended
    assert not guide().ended


def test_a_step_that_failed_is_read_again_across_the_mark() -> None:
    """The engine computed tokens behind the mark, lost them, and the model goes on reasoning."""
    place = guide()
    place.read([*THOUGHT, *MARK, *b"ye"])
    place.read([*THOUGHT, *MARK])
    assert allowed(place) == {"y", "n"}
    place.read([*THOUGHT, *MARK, *b"n"])
    place.read([*THOUGHT, *MARK[:2]])
    assert place.waits
    assert place.forced == []
    other = [*THOUGHT, *b" more", *MARK]
    place.read(other)
    assert allowed(place) == {"y", "n"}
    place.read([*other, *ANSWER])
    assert place.ended


def test_the_first_mark_counts() -> None:
    place = guide("</t>|no")
    place.read([*MARK, *MARK])
    assert place.ended


TOKENS = st.sampled_from([*b"</t>yesno "])


@settings(max_examples=examples(200), deadline=None)
@given(tokens=st.lists(TOKENS, max_size=30), lengths=st.lists(st.integers(0, 30), max_size=6))
def test_any_way_to_an_answer_ends_at_the_same_place(tokens: list[int], lengths: list[int]) -> None:
    """Rollbacks to any length, over the mark and back, leave no trace."""
    anything, direct = guide("(.|\n)*"), guide("(.|\n)*")
    for length in (*lengths, len(tokens)):
        anything.read(tokens[:length])
    direct.read(tokens)
    found = bytes(tokens).find(bytes(MARK))
    assert anything.waits == direct.waits == (found < 0)
    assert anything._read == direct._read == (0 if found < 0 else len(tokens) - found - len(MARK))


def sequence(name: str, output: list[int], drafts: list[int] | None = None) -> Any:
    return SimpleNamespace(id=name, output_ids=output, drafts=drafts or [])


def test_masks_leave_out_the_answers_that_wait() -> None:
    """One of two answers in a batch still reasons. Its row has no mask."""
    guides = Guides()
    guides.add("thinks", grammar(), MARK)
    guides.add("writes", grammar(), MARK)
    failures: dict[str, Exception] = {}
    rows = [(sequence("thinks", THOUGHT), 0), (sequence("writes", [*THOUGHT, *MARK]), 0)]
    masks, late = guides.masks(rows, END + 1, failures)
    assert masks is not None
    assert not late
    assert masks.rows == [1]
    assert masks.allows(0, ord("y"))
    assert not masks.allows(0, ord("z"))
    assert guides.masks(rows[:1], END + 1, failures) == (None, set())
    assert failures == {}


def test_the_answer_is_complete_at_its_last_token() -> None:
    place = grammar("yes").guide(MARK)
    assert place.look(THOUGHT, [*MARK, *ANSWER], None, 9).complete == len(MARK) + len(ANSWER)
    assert place.look(THOUGHT, [*MARK, *b"ye"], None, 9).complete is None
    assert place.look(THOUGHT, list(b"yes"), None, 9).complete is None, "the model only considers it"


BEGIN = tuple(b"<t>")


def counted(text: bytes, *, begun: bool = False, steps: int = 1, marks: Any = (BEGIN, MARK)) -> int:
    count = ReasoningCount(marks, begun)
    for at in range(0, len(text), steps):
        count.add(list(text[at : at + steps]))
    return count.tokens


@pytest.mark.parametrize("steps", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "begun", "tokens"),
    [
        (b"", False, 0),
        (b"yes", False, 0),
        (b"<t>hm</t>yes", False, 9),
        (b"<t></t>", False, 7),
        (b"<t>hm", False, 5),
        (b"<t", False, 0),
        (b"<th>", False, 0),
        (b"yes <t>hm</t>", False, 0),
        (b"<t>a</t>b<t>c</t>", False, 8),
        (b"hm</t>yes", True, 6),
        (b"hm", True, 2),
        (b"</t>", True, 4),
        (b"a</</t>b", True, 7),
    ],
)
def test_tokens_of_reasoning_are_counted_with_their_marks(
    text: bytes, begun: bool, tokens: int, steps: int
) -> None:
    assert counted(text, begun=begun, steps=steps) == tokens


def test_a_model_without_reasoning() -> None:
    assert counted(b"<t>hm</t>", marks=None) == 0
    assert counted(b"<t>hm</t>", marks=None, begun=True) == 0
