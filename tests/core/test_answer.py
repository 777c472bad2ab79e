"""AnswerBuilder assembles the interleaved deltas of several choices into one answer."""

from __future__ import annotations

from fovea.core.types import AnswerBuilder, Delta, StageTimings, TokenLogprob, Usage


def test_choices_are_put_together_in_any_interleaving() -> None:
    builder = AnswerBuilder(2)
    logprob = TokenLogprob(7, "x", -0.5)
    for delta in (
        Delta(1, "b", (2,)),
        Delta(0, "a", (1,), (logprob,)),
        Delta(1, "B", (3, 4), finish_reason="length"),
        Delta(0, "", (5,), finish_reason="stop", usage=Usage(9, 4, 1, 2), timings=StageTimings(ttft=0.25)),
    ):
        builder.add(delta)
    answer = builder.build()
    assert answer.texts == ("a", "bB")
    assert answer.text == "a"
    assert answer.token_ids == ((1, 5), (2, 3, 4))
    assert answer.finish_reasons == ("stop", "length")
    assert answer.logprobs == ((logprob,), ())
    assert answer.usage == Usage(9, 4, 1, 2)
    assert answer.timings.ttft == 0.25


def test_a_choice_without_a_finish_reason_is_aborted() -> None:
    builder = AnswerBuilder(1)
    builder.add(Delta(0, "half"))
    assert builder.build().finish_reasons == ("abort",)
