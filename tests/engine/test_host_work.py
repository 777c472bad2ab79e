"""The engine's thread does little for each row of a decode step: counted in calls, not in seconds.

An idle GPU, or a fast CPU, waits for this thread. Once it woke the event loop for every token, made text of
every token, and built the arrays of each step again, sequence by sequence: 16 ms of a step with 256 rows, of
which `benchmarks/host_work.py` tells the rest.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import EngineError
from fovea.engine.request.detokenize import TextStream
from fovea.engine.step import job_board
from tests.support.draft_layers import computed, draft_always, eagle3
from tests.support.engines import ask, assert_idle, engine

MOST_CALLS = 56
"""Calls of Python functions for a further row in a step; there are 54, and there were 160."""
MOST_DRAFT_CALLS = 78
"""Calls for three drafts of a further answer; there are 75."""
FEW, MANY = 2, 6
Calls = Counter[tuple[str, str]]


async def texts(machine: Engine, rows: int, tokens: int, **options: Any) -> list[str]:
    """Return the answers to questions that are asked at once, in one event loop."""

    async def one(number: int) -> str:
        stream = machine.stream(
            ask(f"{number}"), temperature=0, max_tokens=tokens, ignore_eos=True, **options
        )
        return "".join([delta.text async for delta in stream])

    return list(await asyncio.gather(*map(one, range(rows))))


class Watch:
    """Watches the engine's thread in steps that only decode `rows` rows, and sees no new block of KV.

    calls: calls of Python functions in such a step, by file and name; the fewest of all steps, because a
        sequence gets a block of KV in some.
    wake_ups: calls that woke the event loop for events, in all steps.
    steps: all steps that computed something.
    """

    def __init__(self, machine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Calls | None = None
        self.wake_ups = self.steps = 0
        step, stepper = machine.loop._step, machine.loop.stepper

        def watched() -> None:
            seen: Calls = Counter()

            def note(frame: FrameType, event: str, _: object) -> None:
                if event == "call":
                    seen[Path(frame.f_code.co_filename).name, frame.f_code.co_name] += 1

            running = machine.scheduler.running
            decodes = len(running) == rows and all(seq.decoding for seq in running)
            before = stepper.steps
            sys.setprofile(note)
            try:
                step()
            finally:
                sys.setprofile(None)
            self.steps += stepper.steps - before
            if decodes and len(machine.scheduler.running) == rows:
                self.calls = min(self.calls or seen, seen, key=Counter.total)

        put_all = job_board._put_all

        def counted(mail: job_board.Mail) -> None:
            self.wake_ups += 1
            put_all(mail)

        monkeypatch.setattr(machine.loop, "_step", watched)
        monkeypatch.setattr(job_board, "_put_all", counted)


def watched(folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Watch:
    """Return what is seen in the steps of so many answers at once."""
    with engine(folder) as machine, monkeypatch.context() as patch:
        watch = Watch(machine, rows, patch)
        asyncio.run(texts(machine, rows, 24, **options))
        assert_idle(machine)
        return watch


def test_a_further_row_costs_few_calls(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (watched(qwen, rows, monkeypatch).calls for rows in (FEW, MANY))
    assert few is not None
    assert many is not None
    more = many - few
    assert more.total() <= MOST_CALLS * (MANY - FEW), more.most_common(20)
    files = {file for file, _ in many}
    assert "reader.py" not in files, "text is made elsewhere"
    assert not files & {"detokenize.py", "tokenizer.py", "prompt_arrays.py", "positions.py"}


def test_an_event_loop_is_woken_at_most_once_in_a_step(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watched(qwen, MANY, monkeypatch)
    assert 24 <= watch.wake_ups <= watch.steps


def test_answers_with_stop_strings_end_in_the_step_that_completes_one(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these are read in the engine's thread: no token is computed that the answer does not have."""
    with engine(qwen) as machine:
        (text,) = asyncio.run(texts(machine, 1, 12))
        stop = text[3:5]
        before = machine.stats()["generation_tokens"]
        (short,) = asyncio.run(texts(machine, 1, 12, stop=(stop,)))
        assert short == text[: text.index(stop)]
        assert machine.stats()["generation_tokens"] - before < 12
        assert_idle(machine)


def test_an_answer_that_cannot_be_read_fails_alone(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the request's id; the error, which may hold secrets, goes to the log."""
    with engine(qwen) as machine:
        (truth,) = asyncio.run(texts(machine, 1, 8))
        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "push", lambda self, token: 1 / 0)
            with pytest.raises(EngineError, match="the server's log has the details"):
                machine.generate(ask("0"), temperature=0, max_tokens=8)
        assert "ZeroDivisionError" in caplog.text
        assert asyncio.run(texts(machine, 1, 8)) == [truth]
        assert_idle(machine)


def test_a_further_draft_costs_few_calls(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a draft layer computes one row for each answer, whatever their number."""
    files = eagle3(qwen, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    settings = {"speculate": "layer", "draft_layer": str(files.write(tmp_path)), "speculative_tokens": 3}
    calls: dict[int, Calls] = {}
    for rows in (FEW, MANY):
        with engine(qwen, **settings) as machine, monkeypatch.context() as patch:
            draft_always(machine, patch)
            drafter = computed(machine)
            draft, seen = drafter.draft, Counter[tuple[str, str]]()

            def note(frame: FrameType, event: str, _: object, seen: Calls = seen) -> None:
                if event == "call":
                    seen[Path(frame.f_code.co_filename).name, frame.f_code.co_name] += 1

            def watched_draft(
                asked: Any,
                most: int,
                rows: int = rows,
                draft: Any = draft,
                seen: Calls = seen,
                note: Any = note,
            ) -> Any:
                seen.clear()
                sys.setprofile(note)
                try:
                    found = draft(asked, most)
                finally:
                    sys.setprofile(None)
                if [len(each.tokens) for each in found.values()] == [3] * rows:
                    calls[rows] = min(calls.get(rows, seen), seen, key=Counter.total).copy()
                return found

            patch.setattr(drafter, "draft", watched_draft)
            asyncio.run(texts(machine, rows, 16))
            assert_idle(machine)
    more = calls[MANY] - calls[FEW]
    assert more.total() <= MOST_DRAFT_CALLS * (MANY - FEW), more.most_common(20)
