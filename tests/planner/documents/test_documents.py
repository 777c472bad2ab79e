"""Right figures of the documents are recomputed to their printed digits; wrong ones differ, as stated."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.planner.documents import figures
from tests.planner.documents.claim import RELATIONS, VERDICTS, Claim
from tests.planner.documents.table import DOCUMENTS, shown

CLAIMS = [claim for document in DOCUMENTS for claim in document.claims]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_the_verdict_follows_from_the_arithmetic(claim: Claim) -> None:
    assert claim.relation in RELATIONS
    assert claim.judge() == claim.verdict
    assert math.isfinite(claim.result)
    if claim.verdict == "wrong" and claim.relation in ("equals", "about"):
        assert round(claim.result, claim.digits) != round(claim.printed, claim.digits)
    if claim.verdict == "right" and claim.relation == "equals":
        assert round(claim.result, claim.digits) == claim.printed


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.says)
def test_the_printed_figure_stands_in_the_text(claim: Claim) -> None:
    """The text of a claim shows the number that is compared, so that the two cannot drift apart."""
    digits = f"{claim.printed:,.{claim.digits}f}"
    plain = digits.rstrip("0").rstrip(".") if claim.digits else digits
    spelled = {"1": "one", "2": "twice", "3": "three", "4": "four"}.get(plain, digits)
    assert any(text in claim.says for text in (digits, plain, spelled))


def test_wrong_claims_say_enough() -> None:
    """A reader has to see why: by a note, or by a result that speaks for itself."""
    assert all(claim.why or shown(claim) for claim in CLAIMS if claim.verdict == "wrong")
    assert {claim.verdict for claim in CLAIMS} == set(VERDICTS)


def test_a_verdict_that_is_not_true_is_found() -> None:
    right = Claim("", "", "", 188.74, 188.7, 1)
    assert right.judge() == "right"
    assert dataclasses.replace(right, printed=188.8).judge() == "rounded"
    assert dataclasses.replace(right, printed=188.9).judge() == "wrong"
    assert dataclasses.replace(right, printed=180.0, relation="about").judge() == "rounded"
    assert dataclasses.replace(right, printed=170.0, relation="about").judge() == "wrong"
    assert dataclasses.replace(right, printed=180.0, relation="at least").judge() == "wrong"
    assert dataclasses.replace(right, printed=180.0, relation="at most").judge() == "right"
    assert dataclasses.replace(right, printed=180.0, relation="between", high=188.0).judge() == "wrong"


def test_expected_tokens_are_those_of_counting() -> None:
    """Sum over the number of accepted drafts, each times its probability, and the target's own token."""
    for drafts in (0, 1, 4, 8):
        for acceptance in (0.0, 0.5, 0.75, 1.0):
            counted = 1.0
            for accepted in range(1, drafts + 1):
                last = 1.0 if accepted == drafts else 1 - acceptance
                counted += accepted * acceptance**accepted * last
            assert figures.tokens_per_pass(drafts, acceptance) == pytest.approx(counted)


def test_a_draft_that_costs_a_pass_gains_nothing() -> None:
    assert figures.speculation_gain(1, 0.5, 1.0) < 1
    assert figures.speculation_gain(0, 0.9, 0.1) == 1


def test_the_parameters_of_clip_are_those_of_its_configuration() -> None:
    """transformers counts 303,179,776 in CLIPVisionModel of openai/clip-vit-large-patch14."""
    assert figures.tower_parameters(1024, 24, 4096, 14, 224) == 303_179_776
