"""From spans to seconds of stages; an event loop that says when it works; the file for Perfetto."""

from __future__ import annotations

import asyncio
import json

import pytest

from fovea.core.stage import Recorder, Span, recording, stage
from fovea.observe.chrome import chrome_trace
from fovea.observe.event_loop import watched_loop
from fovea.observe.profile import ON_PATH, STAGES, WAITING, innermost, stage_times


def span(name: str, start: float, end: float, thread: int = 1) -> Span:
    return Span(name, start, end, thread)


def test_every_stage_has_a_place_on_the_path() -> None:
    assert sorted(ON_PATH) == sorted(STAGES)


def test_what_is_nested_is_taken_out() -> None:
    step = [span("schedule", 0, 10), span("encoder", 1, 5), span("projector", 2, 3), span("prefill", 6, 9)]
    assert innermost(step) == [
        ("schedule", 0, 1), ("encoder", 1, 2), ("projector", 2, 3), ("encoder", 3, 5), ("schedule", 5, 6),
        ("prefill", 6, 9), ("schedule", 9, 10),
    ]  # fmt: skip


def test_spans_that_touch_and_spans_that_are_equal() -> None:
    assert innermost([span("prefill", 0, 1), span("head", 1, 2)]) == [("prefill", 0, 1), ("head", 1, 2)]
    assert innermost([span("encoder", 0, 1), span("projector", 0, 1)]) == [("projector", 0, 1)]


def test_busy_of_one_request() -> None:
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


def test_where_stages_overlap_the_model_has_the_time() -> None:
    """Both are busy for four seconds; the two that they share are the decoder's."""
    times = stage_times([span("decode step", 0, 4, 1), span("server", 2, 6, 2)], 0, 6)
    assert (times["decode step"].busy_s, times["server"].busy_s) == (4, 4)
    assert (times["decode step"].path_s, times["server"].path_s) == (4, 2)
    assert times[WAITING].path_s == 0


def test_several_threads_at_one_stage() -> None:
    times = stage_times([span("patchify", 0, 2, 1), span("patchify", 1, 3, 2)], 0, 4)
    assert (times["patchify"].busy_s, times["patchify"].path_s, times["patchify"].calls) == (4, 3, 2)
    assert times[WAITING].path_s == 1


def test_only_the_time_that_is_asked_about() -> None:
    spans = [span("prefill", 0, 4), span("head", 4, 6), span("sampling", 20, 30)]
    times = stage_times(spans, 2, 5)
    assert {name: time.busy_s for name, time in times.items()} == {"prefill": 2, "head": 1, WAITING: 0}
    assert times["prefill"].calls == 0  # it began before


def test_nothing_at_all_is_waiting() -> None:
    assert stage_times([], 1, 3)[WAITING].path_s == 2


def test_a_loop_says_when_it_works_and_not_when_it_waits() -> None:
    recorder = Recorder()

    async def work() -> float:
        before = recorder.clock()
        with stage("tokenize"):
            begun = recorder.clock()  # inside: a stage's time begins a little after `before`
            while recorder.clock() < begun + 0.01:
                pass
        await asyncio.sleep(0.05)
        return recorder.clock() - before

    with asyncio.Runner(loop_factory=watched_loop("server")) as runner, recording(recorder):
        taken = runner.run(work())
    times = stage_times(recorder.spans, 0, float("inf"))
    assert times["tokenize"].busy_s >= 0.01
    assert times["server"].calls >= 2
    assert times["server"].busy_s + times["tokenize"].busy_s < taken


def test_trace_for_perfetto() -> None:
    recorder = Recorder()
    recorder.threads = {7: "fovea-engine"}
    recorder.spans = [Span("prefill", 1.001, 1.002, 7, {"rows": 5}), Span("schedule", 1.0, 1.004, 7)]
    made = json.loads(json.dumps(chrome_trace(recorder, [("alone 0", 1.0, 1.005)], {"model": "m"})))
    names, outer, inner, begun, ended = made["traceEvents"]
    assert names["args"] == {"name": "fovea-engine"}
    assert (outer["name"], outer["ts"], outer["dur"], outer["ph"]) == ("schedule", 0.0, 4000.0, "X")
    assert (inner["name"], inner["ts"], inner["dur"], inner["tid"]) == ("prefill", 1000.0, 1000.0, 7)
    assert inner["args"] == {"rows": 5}
    assert (begun["ph"], begun["ts"], ended["ph"], ended["ts"]) == ("b", 0.0, "e", 5000.0)
    assert begun["id"] == ended["id"]
    assert made["otherData"] == {"model": "m"}


@pytest.mark.parametrize("requests", [[], [("alone 0", 0.0, 1.0)]])
def test_a_trace_without_spans(requests: list[tuple[str, float, float]]) -> None:
    assert len(chrome_trace(Recorder(), requests)["traceEvents"]) == 2 * len(requests)
