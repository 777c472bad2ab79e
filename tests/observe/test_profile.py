"""Seconds of stages from spans, the event loop that records its work, and the trace file for Perfetto."""

from __future__ import annotations

import asyncio
import json

import pytest

from fovea.core.measure import Recorder, Span, recording, stage
from fovea.observe.profile import (
    PRECEDENCE,
    STAGES,
    WAITING,
    chrome_trace,
    innermost,
    stage_times,
    watched_loop,
)


def span(name: str, start: float, end: float, thread: int = 1) -> Span:
    return Span(name, start, end, thread)


def test_every_stage_has_a_precedence() -> None:
    assert sorted(PRECEDENCE) == sorted(STAGES)


def test_nested_spans_are_subtracted() -> None:
    step = [span("schedule", 0, 10), span("encoder", 1, 5), span("projector", 2, 3), span("prefill", 6, 9)]
    assert innermost(step) == [
        ("schedule", 0, 1), ("encoder", 1, 2), ("projector", 2, 3), ("encoder", 3, 5), ("schedule", 5, 6),
        ("prefill", 6, 9), ("schedule", 9, 10),
    ]  # fmt: skip


def test_adjacent_and_equal_spans() -> None:
    assert innermost([span("prefill", 0, 1), span("head", 1, 2)]) == [("prefill", 0, 1), ("head", 1, 2)]
    assert innermost([span("encoder", 0, 1), span("projector", 0, 1)]) == [("projector", 0, 1)]


def test_busy_seconds_of_one_request() -> None:
    spans = [
        span("server", 0, 2, 1),
        span("schedule", 2, 8, 2),
        span("decode step", 3, 7, 2),
        span("client", 9, 10, 3),
    ]
    times = stage_times(spans, 0, 10)
    assert list(times) == ["client", "server", "schedule", "decode step", WAITING]
    assert {name: time.busy_s for name, time in times.items()} == {
        "client": 1, "server": 2, "schedule": 2, "decode step": 4, WAITING: 1,
    }  # fmt: skip
    assert sum(time.path_s for time in times.values()) == 10
    assert times["decode step"].calls == 1


def test_overlapping_time_belongs_to_the_model() -> None:
    """Both stages are busy for four seconds. The two seconds of their overlap belong to the decode step."""
    times = stage_times([span("decode step", 0, 4, 1), span("server", 2, 6, 2)], 0, 6)
    assert (times["decode step"].busy_s, times["server"].busy_s) == (4, 4)
    assert (times["decode step"].path_s, times["server"].path_s) == (4, 2)
    assert times[WAITING].path_s == 0


def test_one_stage_in_several_threads() -> None:
    times = stage_times([span("patchify", 0, 2, 1), span("patchify", 1, 3, 2)], 0, 4)
    assert (times["patchify"].busy_s, times["patchify"].path_s, times["patchify"].calls) == (4, 3, 2)
    assert times[WAITING].path_s == 1


def test_spans_are_cut_to_the_interval() -> None:
    spans = [span("prefill", 0, 4), span("head", 4, 6), span("sampling", 20, 30)]
    times = stage_times(spans, 2, 5)
    assert {name: time.busy_s for name, time in times.items()} == {"prefill": 2, "head": 1, WAITING: 0}
    assert times["prefill"].calls == 0  # it started before the interval


def test_time_without_spans_is_waiting() -> None:
    assert stage_times([], 1, 3)[WAITING].path_s == 2


def test_an_event_loop_records_its_work_and_not_its_waits() -> None:
    recorder = Recorder()

    async def work() -> float:
        before = recorder.clock()
        with stage("tokenize"):
            begin = recorder.clock()  # inside: a stage's time begins a little after `before`
            while recorder.clock() < begin + 0.01:
                pass
        await asyncio.sleep(0.05)
        return recorder.clock() - before

    with asyncio.Runner(loop_factory=watched_loop("server")) as runner, recording(recorder):
        total_s = runner.run(work())
    times = stage_times(recorder.spans, 0, float("inf"))
    assert times["tokenize"].busy_s >= 0.01
    assert times["server"].calls >= 2
    assert times["server"].busy_s + times["tokenize"].busy_s < total_s


def test_trace_for_perfetto() -> None:
    recorder = Recorder()
    recorder.threads = {7: "fovea-engine"}
    recorder.spans = [Span("prefill", 1.001, 1.002, 7, {"rows": 5}), Span("schedule", 1.0, 1.004, 7)]
    trace = json.loads(json.dumps(chrome_trace(recorder, [("alone 0", 1.0, 1.005)], {"model": "m"})))
    names, outer, inner, begin, finish = trace["traceEvents"]
    assert names["args"] == {"name": "fovea-engine"}
    assert (outer["name"], outer["ts"], outer["dur"], outer["ph"]) == ("schedule", 0.0, 4000.0, "X")
    assert (inner["name"], inner["ts"], inner["dur"], inner["tid"]) == ("prefill", 1000.0, 1000.0, 7)
    assert inner["args"] == {"rows": 5}
    assert (begin["ph"], begin["ts"], finish["ph"], finish["ts"]) == ("b", 0.0, "e", 5000.0)
    assert begin["id"] == finish["id"]
    assert trace["otherData"] == {"model": "m"}


@pytest.mark.parametrize("requests", [[], [("alone 0", 0.0, 1.0)]])
def test_a_trace_without_spans(requests: list[tuple[str, float, float]]) -> None:
    assert len(chrome_trace(Recorder(), requests)["traceEvents"]) == 2 * len(requests)
