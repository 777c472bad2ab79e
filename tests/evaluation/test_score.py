"""Right and wrong answers, confidence intervals, and the report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.evaluation.datasets import Case, Exchange
from fovea.evaluation.score import Result, Row, Z, matches, report, wilson

# From Newcombe, Statistics in Medicine 17 (1998) 857-872, table I: method 3, the score interval without
# continuity correction, to four digits.
PUBLISHED = [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("correct", "cases", "low", "high"), PUBLISHED)
def test_wilson_as_published(correct: int, cases: int, low: float, high: float) -> None:
    assert wilson(correct, cases) == pytest.approx((low, high), abs=5e-5)


def test_z_is_the_normal_quantile() -> None:
    assert math.erf(Z / math.sqrt(2)) == pytest.approx(0.95, abs=1e-15)


counts = st.integers(1, 10_000).flatmap(lambda cases: st.tuples(st.integers(0, cases), st.just(cases)))


@given(counts)
def test_the_ends_of_wilsons_interval_satisfy_its_definition(count: tuple[int, int]) -> None:
    """At both ends p, |share - p| = z * sqrt(p (1 - p) / n). The test does not use the closed formula."""
    correct, cases = count
    low, high = wilson(correct, cases)
    share = correct / cases
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        assert abs(share - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / cases), abs=1e-9)


@given(counts)
def test_wilson_is_symmetric(count: tuple[int, int]) -> None:
    correct, cases = count
    low, high = wilson(correct, cases)
    assert wilson(cases - correct, cases) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_more_cases_give_a_narrower_interval() -> None:
    widths = [high - low for low, high in (wilson(n // 2, n) for n in (2, 8, 32, 128, 512))]
    assert widths == sorted(widths, reverse=True)


def test_without_cases_the_interval_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("red", "red"),
        ("Red.", "red"),
        ("  RED \n", "red"),
        ("red!", "Red."),
        ("red .", "red"),
        ("a red  circle", "A red circle."),
        ("a\nred\tcircle", "a red circle"),
        ("3.", "3"),
        ("ÄPFEL", "äpfel"),
        ('{"b": 2, "a": 1}', '{"a":1,"b":2}'),
        ('{"a": 1.0}', '{"a": 1}'),
        ('[1, "Two", {"x": null}]', ' [1,"Two",{"x":null}]'),
        ('{"A": 1}', '{"a": 1}'),
        ("{not json}", "{NOT json}."),
    ],
)
def test_right(answer: str, accepted: str) -> None:
    assert matches(answer, ["something else", accepted])


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("", "red"),
        ("reds", "red"),
        ("the red", "red"),
        ("red, blue", "red blue"),
        ("3.5", "35"),
        ("re d", "red"),
        ('{"a": "x  y", "b": 1}', '{"a": "x y", "b": 2}'),
        ('{"a": 1, "b": 2}', '{"a": 1}'),
        ("[2, 1]", "[1, 2]"),
        ("[1]", "[true]"),
        ('{"a": false}', '{"a": 0}'),
        ("[[1], 2]", "[[true], 2]"),
        ('{"a": 1', '{"a": 1}'),
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ('Here it is: {"a": 1}', '{"a": 1}'),
        ("[" * 100_000, "[1]"),
        ("1" * 10_000, "[1]"),
        ("NaN", "[1]"),
        ("7", '"7"'),
    ],
)
def test_wrong(answer: str, accepted: str) -> None:
    assert not matches(answer, [accepted])


def test_without_accepted_answers_nothing_is_right() -> None:
    assert not matches("red", [])


def case(kind: str = "colour", turns: int = 1, **facts: int) -> Case:
    return Case("id", kind, (), tuple(Exchange(f"{n}?", ("yes", "aye")) for n in range(turns)), facts)


def result(*answers: str, of: Case, tokens: int = 0) -> Result:
    return Result(of, answers, tokens, tokens * 2, tokens * 3)


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        (("yes", "Aye.", "yes"), True),
        (("yes", "no", "yes"), False),
        (("no", "yes", "yes"), False),
        (("yes", "yes"), False),
        ((), False),
        (("yes", "yes", "yes", "yes"), False),
    ],
)
def test_a_conversation_is_right_when_all_of_it_is(answers: tuple[str, ...], right: bool) -> None:
    assert result(*answers, of=case(turns=3)).correct is right


def test_a_report_counts_per_kind_and_together() -> None:
    rows = report([
        result("yes", of=case("shape"), tokens=10),
        result("no", of=case("colour"), tokens=20),
        result("aye", of=case("shape"), tokens=30),
        result("no", of=case("shape"), tokens=2),
    ])  # fmt: skip
    assert rows == [
        Row("shape", 3, 2, *wilson(2, 3), 14, 28, 42),
        Row("colour", 1, 0, *wilson(0, 1), 20, 40, 60),
        Row("all", 4, 2, *wilson(2, 4), 15.5, 31, 46.5),
    ]
    assert [row.accuracy for row in rows] == [2 / 3, 0, 0.5]


def test_slices_come_below_their_kind() -> None:
    rows = report([
        result("yes", of=case("counting", count=5)),
        result("no", of=case("counting", count=6)),
        result("yes", of=case("reading", characters=4, height=20)),
        result("no", of=case("reading", characters=4, height=19)),
        result("no", of=case("reading", characters=5, height=40)),
        result("yes", of=case("colour", count=1)),
    ])  # fmt: skip
    assert [(row.kind, row.correct, row.cases) for row in rows] == [
        ("counting", 1, 2),
        ("counting up to 5", 1, 1),
        ("reading", 1, 3),
        ("reading 4 characters at 20 px or more", 1, 1),
        ("colour", 1, 1),
        ("all", 3, 6),
    ]


def test_a_slice_of_all_cases_or_none_is_left_out() -> None:
    """This also holds for a user's own counting questions, which have no facts."""
    for facts in ({"count": 2}, {"count": 9}, {}):
        rows = report(
            [result("yes", of=case("counting", **facts)), result("yes", of=case("counting", **facts))]
        )
        assert [row.kind for row in rows] == ["counting", "all"]


def test_cases_without_kinds_are_one_row() -> None:
    assert [row.kind for row in report([result("yes", of=case("other"))])] == ["all"]
    mixed = report([result("yes", of=case("other")), result("no", of=case("mine"))])
    assert [row.kind for row in mixed] == ["other", "mine", "all"]


def test_a_report_of_nothing() -> None:
    (row,) = report([])
    assert (row.cases, row.accuracy, row.low, row.high) == (0, 0.0, 0.0, 1.0)
