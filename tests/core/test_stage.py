"""What takes time says so, to whoever listens and to nobody else."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from fovea.core.stage import NO_SPAN, Recorder, active_recorder, recording, stage


def ticking() -> Recorder:
    """A clock that is a second later at every look."""
    seconds = count()
    return Recorder(clock=lambda: float(next(seconds)))


def test_nobody_listens() -> None:
    """The same object every time: nothing is made, nothing is kept."""
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
    heard = [(span.name, span.start, span.end, dict(span.notes)) for span in recorder.spans]
    assert heard == [("prefill", 1.0, 2.0, {"rows": 3}), ("schedule", 0.0, 3.0, {})]
    assert stage("schedule") is NO_SPAN


def test_what_fails_took_its_time_too() -> None:
    recorder = ticking()
    with recording(recorder), pytest.raises(KeyError), stage("fetch"):
        raise KeyError
    assert [span.name for span in recorder.spans] == ["fetch"]


def test_a_stage_begun_unheard_is_not_entered() -> None:
    recorder = ticking()
    unheard = stage("fetch")
    with recording(recorder), unheard:
        pass
    assert recorder.spans == []


def test_threads_have_names() -> None:
    recorder = Recorder()
    begun = threading.Barrier(4)

    def work() -> None:
        begun.wait()
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


def test_one_listener_at_a_time() -> None:
    with recording(Recorder()), pytest.raises(RuntimeError, match="listens already"), recording(Recorder()):
        pass
    assert active_recorder() is None


def test_a_device_is_waited_for_before_the_end_is_taken() -> None:
    told: list[str] = []
    recorder = Recorder(clock=lambda: float(len(told)), ending=told.append)
    with recording(recorder), stage("encoder"):
        pass
    assert told == ["encoder"]
    assert (recorder.spans[0].start, recorder.spans[0].end) == (0.0, 1.0)
