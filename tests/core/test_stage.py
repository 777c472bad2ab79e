"""Stages are recorded as spans while a recorder is active, and cost nothing otherwise."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from fovea.core.measure import NO_SPAN, Recorder, active_recorder, recording, stage


def ticking() -> Recorder:
    """A recorder whose clock advances by one second at every reading."""
    seconds = count()
    return Recorder(clock=lambda: float(next(seconds)))


def test_without_a_recorder_every_stage_is_one_shared_object() -> None:
    """Nothing is allocated and nothing is recorded."""
    assert stage("resize") is NO_SPAN
    assert stage("prefill", rows=3) is NO_SPAN
    with stage("resize"):
        assert active_recorder() is None


def test_inner_stages_end_first() -> None:
    recorder = ticking()
    with recording(recorder), stage("schedule"):
        assert active_recorder() is recorder
        with stage("prefill", rows=3):
            pass
    spans = [(span.name, span.start, span.end, dict(span.notes)) for span in recorder.spans]
    assert spans == [("prefill", 1.0, 2.0, {"rows": 3}), ("schedule", 0.0, 3.0, {})]
    assert stage("schedule") is NO_SPAN


def test_a_stage_that_raises_is_recorded() -> None:
    recorder = ticking()
    with recording(recorder), pytest.raises(KeyError), stage("fetch"):
        raise KeyError
    assert [span.name for span in recorder.spans] == ["fetch"]


def test_a_stage_that_was_created_before_the_recorder_is_not_recorded() -> None:
    recorder = ticking()
    early = stage("fetch")
    with recording(recorder), early:
        pass
    assert recorder.spans == []


def test_spans_of_several_threads_are_recorded_with_their_names() -> None:
    recorder = Recorder()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(50):
            with stage("patchify"):
                pass

    with recording(recorder):
        threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorder.spans) == 200
    assert sorted(recorder.threads.values()) == [f"worker {n}" for n in range(4)]
    assert {span.thread for span in recorder.spans} == set(recorder.threads)


def test_only_one_recorder_is_active_at_a_time() -> None:
    message = "another recorder is active"
    with recording(Recorder()), pytest.raises(RuntimeError, match=message), recording(Recorder()):
        pass
    assert active_recorder() is None


def test_the_recorder_waits_for_the_device_before_it_measures_the_end() -> None:
    endings: list[str] = []
    recorder = Recorder(clock=lambda: float(len(endings)), before_end=endings.append)
    with recording(recorder), stage("encoder"):
        pass
    assert endings == ["encoder"]
    assert (recorder.spans[0].start, recorder.spans[0].end) == (0.0, 1.0)
