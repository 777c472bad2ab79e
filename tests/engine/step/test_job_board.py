"""Events for clients: tokens, ends, errors and timings, without a model and without a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fovea.core.errors import EngineError, InvalidRequest
from fovea.core.sampling import SamplingParams
from fovea.core.types import FinishReason, StageTimings, TokenLogprob
from fovea.engine.config import EngineConfig
from fovea.engine.job import Event, Job, SampledToken, SequenceInputs
from fovea.engine.request.answer import AnswerReader
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.sequence import Drafts, DraftUse, ImageSpan, Sequence
from fovea.engine.simulate.assemble import simulated_stepper
from fovea.engine.simulate.executor import CostExecutor
from fovea.engine.simulate.serving import PlainTokenizer
from fovea.engine.step.executor import StepResult
from fovea.engine.step.job_board import JobBoard
from fovea.engine.step.stepper import Step, Stepper
from fovea.observe.table import FIGURES
from fovea.planner.cost import CostModel
from tests.engine.request.test_tokenizer import sentencepiece

COST = CostModel()
WORD, END = 300, 2


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    from fovea.engine.simulate.serving import FOLDER

    return ChatTokenizer(PlainTokenizer(FOLDER), None, eos_ids=frozenset({END}))


@dataclass(frozen=True)
class Heard:
    """An event as its client reads it."""

    event: Event
    text: str
    logprobs: tuple[TokenLogprob, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(pick.token for pick in self.event.picks)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.event.finish_reason

    @property
    def error(self) -> Exception | None:
        return self.event.error

    @property
    def timings(self) -> StageTimings:
        return self.event.timings


class Machine:
    """A stepper over a cost model, its job board, and a clock.

    pick: returns the next token of a sequence.
    """

    def __init__(self, tokenizer: ChatTokenizer, pick: Callable[[Sequence], int] = lambda seq: WORD) -> None:
        config = EngineConfig.of(kv_blocks=64)
        self.stepper: Stepper = simulated_stepper(
            config, COST, lambda embeddings: CostExecutor(COST, embeddings, pick)
        )
        self.tokenizer = tokenizer
        self.board = JobBoard(self.stepper, tokenizer)
        self.events: dict[str, list[Heard]] = {}
        self.now = 0.0

    def job(
        self,
        name: str,
        *,
        max_tokens: int = 3,
        spans: tuple[ImageSpan, ...] = (),
        encode_only: bool = False,
        **sampling_options: Any,
    ) -> Job:
        sampling = SamplingParams(**sampling_options)
        heard = self.events.setdefault(name, [])
        seq = Sequence(
            f"{name}:0",
            [5, 6, 7, 8, 9, 10, 11, 12],
            sampling,
            max_tokens,
            spans,
            arrival=self.now,
            encode_only=encode_only,
        )
        reader = AnswerReader(self.tokenizer, sampling)

        def hear(event: Event) -> None:
            reading = event.reading or reader.read(
                event.picks, ended=event.ended, last=event.finish_reason is not None
            )
            heard.append(Heard(event, reading.text, reading.logprobs))

        return Job(seq, SequenceInputs(), hear, reader, preprocess_s=0.25)

    def step(self, change: Callable[[StepResult], None] = lambda result: None) -> Step:
        """Run one step of one second. change: alters the executor's result."""
        step = self.stepper.plan(self.now)
        self.board.begin_step(step, self.now)
        result = self.stepper.executor.execute(step.plan, step.encode_s)
        change(result)
        self.now += 1.0
        self.stepper.apply(step, result, 1.0)
        self.board.end_step(step, result, self.now)
        return step

    def run(self) -> None:
        for _ in range(100):
            if self.stepper.idle:
                self.stepper.scheduler.check_integrity()
                assert not self.board.jobs
                return
            self.step()
        raise AssertionError("jobs never end")


def test_every_token_is_an_event_and_the_last_one_ends_the_job(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("a")])
    machine.run()
    events = machine.events["a"]
    assert [event.token_ids for event in events] == [(WORD,)] * 3
    assert [event.finish_reason for event in events] == [None, None, "length"]
    assert "".join(event.text for event in events) == tokenizer.decode([WORD] * 3)
    assert machine.board.generated_tokens == 3


def test_the_end_token_ends_a_job_and_is_not_shown(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer, lambda seq: END if len(seq.output_ids) == 1 else WORD)
    machine.board.add([machine.job("a", max_tokens=9)])
    machine.run()
    assert [event.finish_reason for event in machine.events["a"]] == [None, "stop"]
    assert machine.events["a"][-1].text == ""


def test_the_end_token_does_not_count_before_min_tokens_or_when_it_is_ignored(
    tokenizer: ChatTokenizer,
) -> None:
    for options, length in (({"min_tokens": 3}, 3), ({"ignore_eos": True}, 5)):
        machine = Machine(tokenizer, lambda seq: END)
        machine.board.add([machine.job("a", max_tokens=5, **options)])
        machine.run()
        assert len(machine.events["a"]) == length, options


def test_a_stop_string_ends_a_job(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    word = tokenizer.decode([WORD])
    machine.board.add([machine.job("a", max_tokens=9, stop=(word + word,))])
    machine.run()
    assert machine.events["a"][-1].finish_reason == "stop"
    assert "".join(event.text for event in machine.events["a"]) == ""


@pytest.mark.parametrize(
    ("prediction", "sampled", "drafts"),
    [
        ((WORD,), 4, DraftUse(3, 3, 3, 3)),
        ((), 4, DraftUse(3, 3)),
        ((WORD,), 2, DraftUse(3, 1, 3, 1)),
        ((WORD,), 1, DraftUse(3, 0, 3, 0)),
    ],
)
def test_an_answer_counts_its_drafts(
    tokenizer: ChatTokenizer, prediction: tuple[int, ...], sampled: int, drafts: DraftUse
) -> None:
    """sampled: tokens of the second step, of which the last one ends the answer, or one of the first."""
    machine = Machine(tokenizer)
    job = machine.job("a", max_tokens=1 + 4)
    job.inputs.prediction = prediction
    machine.board.add([job])
    machine.step(lambda result: result.drafts.update({"a:0": Drafts([WORD] * 3, [1.0] * 3, 0, "hints")}))

    def accept(result: StepResult) -> None:
        picks = [SampledToken(WORD)] * (sampled - 1) + [SampledToken(WORD, final=True)]
        result.sampled["a:0"] = picks + [SampledToken(WORD)] * (4 - sampled)

    machine.step(accept)
    last = machine.events["a"][-1]
    assert (last.token_ids, last.event.drafts) == ((WORD,) * sampled, drafts)
    counted = machine.stepper.draft_counts.stats()
    assert (counted["drafter_tokens:hints"], counted["drafter_accepted_tokens:hints"]) == (3, 3)
    assert set(counted) <= FIGURES


def test_forced_tokens_are_not_those_of_a_drafter() -> None:
    seq = Sequence("a", [1], SamplingParams(), 9)
    for expected, computed, accepted in (
        (Drafts([1, 2, 3, 4], [1.0] * 4, 2, "hints"), 4, 3),
        (Drafts([1, 2, 3], [1.0] * 3, 0, "prompt"), 3, 1),
        (Drafts.certain([1, 2]), 1, 1),
        (Drafts([1, 2, 3], [1.0] * 3, 2, "hints"), 1, 0),
    ):
        seq.expect(expected)
        seq.count_drafts(computed, accepted)
    assert seq.draft_use == DraftUse(4 + 3 + 1 + 1, 3 + 1 + 1, 2, 1)


def test_tokens_know_their_place_in_the_text(tokenizer: ChatTokenizer) -> None:
    """The token that ends an answer stands behind half a character, which is shown at the end only."""
    half, cut = tokenizer.encode_plain("\U0001f600"), tokenizer.encode_plain("\u00e9")[:1]
    tokens = [WORD, *half, *cut, END]

    def spell(seq: Sequence) -> int:
        return tokens[len(seq.output_ids)]

    def score(result: StepResult) -> None:
        for name, picks in result.sampled.items():
            result.sampled[name] = [pick._replace(logprob=-1.0) for pick in picks]

    machine = Machine(tokenizer, spell)
    machine.board.add([machine.job("a", max_tokens=9)])
    while not machine.stepper.idle:
        machine.step(score)
    entries = [entry for event in machine.events["a"] for entry in event.logprobs]
    word = len(tokenizer.decode([WORD]))
    assert [entry.offset for entry in entries] == [0, *(word,) * len(half), word + 1, word + 2]
    assert [entry.hidden for entry in entries] == [False] * (len(tokens) - 1) + [True]
    text = "".join(event.text for event in machine.events["a"])
    assert text == tokenizer.decode([WORD]) + "\U0001f600\ufffd"


def test_texts_of_tokens_are_the_text_of_the_answer() -> None:
    """By sentencepiece the first word of a text begins without its space, so its first token does, too."""
    words = ChatTokenizer(sentencepiece(), None, eos_ids=frozenset({0}))
    tokens = [*words.encode_plain("a b a"), 0]

    def score(result: StepResult) -> None:
        for name, picks in result.sampled.items():
            result.sampled[name] = [pick._replace(logprob=-1.0, top=((pick.token, -1.0),)) for pick in picks]

    machine = Machine(words, lambda seq: tokens[len(seq.output_ids)])
    machine.board.add([machine.job("a", max_tokens=9)])
    while not machine.stepper.idle:
        machine.step(score)
    entries = [entry for event in machine.events["a"] for entry in event.logprobs]
    text = "".join(event.text for event in machine.events["a"])
    assert text == "".join(entry.text for entry in entries if not entry.hidden) == "a b a"
    assert [entry.text for entry in entries] == [entry.top[0][1] for entry in entries]
    assert [text[entry.offset :].startswith(entry.text) for entry in entries[:-1]] == [True] * (
        len(tokens) - 1
    )


def test_timings_add_up_to_the_last_token(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    job = machine.job("a")
    machine.now = 2.0  # the request arrived two seconds ago, and its preparation took a quarter of a second
    machine.board.add([job])
    machine.run()
    timings = machine.events["a"][-1].timings
    assert (timings.preprocess, timings.queue) == (0.25, 1.75)
    assert (timings.prefill, timings.decode) == (1.0, 2.0)
    assert timings.ttft == 3.0


def test_encoding_time_counts_for_the_first_request_that_needs_the_image(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    span = ImageSpan(0, 1, 4, 4, "cat", (1, 4, 4))
    jobs = [machine.job(name, spans=(span,)) for name in "ab"]
    machine.board.add(jobs)
    machine.run()
    first, second = (machine.events[name][-1].timings for name in "ab")
    assert first.encode == pytest.approx(COST.image(4))
    assert second.encode == 0


def test_an_encode_only_request_ends_when_its_image_is_encoded(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    span = ImageSpan(0, 1, 4, 4, "cat", (1, 4, 4))
    machine.board.add([machine.job("a", spans=(span,), encode_only=True)])
    machine.run()
    (event,) = machine.events["a"]
    assert (event.finish_reason, event.token_ids, event.error) == ("length", (), None)
    assert event.timings.encode == pytest.approx(COST.image(4))


def test_a_running_id_is_refused_and_the_running_job_continues(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("a")])
    machine.step()
    running = machine.events["a"]
    machine.events["a"] = []
    machine.board.add([machine.job("a")])
    (refusal,) = machine.events["a"]
    assert isinstance(refusal.error, InvalidRequest)
    assert "request 'a' is running already" in str(refusal.error)
    machine.run()
    assert running[-1].finish_reason == "length"


def test_a_cancelled_job_gets_one_last_event(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("a", max_tokens=50)])
    machine.step()
    machine.board.cancel(["a:0", "unknown:0"])
    machine.board.cancel(["a:0"])
    assert [event.finish_reason for event in machine.events["a"]] == [None, "abort"]
    machine.run()


def test_an_image_that_fails_ends_its_job_and_no_other(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("bad"), machine.job("good")])

    def fail(result: StepResult) -> None:
        result.sampled.pop("bad:0", None)
        result.failures["bad:0"] = ValueError("these are no pixels")

    machine.step(fail)
    machine.run()
    (event,) = machine.events["bad"]
    assert isinstance(event.error, EngineError)
    assert "these are no pixels" not in str(event.error), "internal errors are for the log"
    assert str(event.error).endswith("the server's log has the details under bad")
    assert "request bad failed" in caplog.text
    assert "these are no pixels" in caplog.text
    assert machine.events["good"][-1].finish_reason == "length"


def test_a_closed_client_ends_only_its_own_job(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop of a client that has left is closed, and a call into it raises."""
    machine = Machine(tokenizer)
    gone, good = machine.job("gone", max_tokens=50), machine.job("good")

    def closed(event: Event) -> None:
        raise RuntimeError("event loop is closed")

    gone.sink = closed
    machine.board.add([gone, good])
    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        machine.run()
    assert gone.seq.finish_reason == "abort"
    assert machine.events["good"][-1].finish_reason == "length"


def test_logprobs_are_written_with_their_tokens(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("a", max_tokens=1, logprobs=True, top_logprobs=2)])

    def with_logprobs(result: StepResult) -> None:
        result.sampled["a:0"] = [SampledToken(WORD, -0.5, ((WORD, -0.5), (END, -1.5)))]

    machine.step(with_logprobs)
    (written,) = machine.events["a"][0].logprobs
    assert (written.id, written.logprob) == (WORD, -0.5)
    assert [entry[0] for entry in written.top] == [WORD, END]
    assert written.text == tokenizer.token_bytes(WORD).decode()


def test_when_the_engine_is_dead_every_client_gets_an_error(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    machine.board.add([machine.job("a"), machine.job("b")])
    machine.board.fail_all(EngineError("the engine stopped"))
    for name in "ab":
        (event,) = machine.events[name]
        assert isinstance(event.error, EngineError)
    assert not machine.board.jobs


def verified(machine: Machine, job: Job, *tokens: int, final: bool = False) -> Heard:
    """Run a prompt's step, then one in which so many tokens are chosen at once. Returns the second event."""
    machine.board.add([job])

    def expect(result: StepResult) -> None:
        result.drafts[job.seq.id] = Drafts.certain(tokens[:-1])

    def choose(result: StepResult) -> None:
        picks = [SampledToken(token, -1.0, ()) for token in tokens]
        picks[-1] = SampledToken(tokens[-1], -1.0, (), final)
        result.sampled[job.seq.id] = picks

    machine.step(expect)
    machine.step(choose)
    name = job.seq.id.partition(":")[0]
    assert len(machine.events[name]) == 2, "one event for all tokens of a step"
    return machine.events[name][1]


def test_the_tokens_of_a_step_are_one_event(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    event = verified(machine, machine.job("a", max_tokens=9), WORD, WORD, WORD)
    assert (event.token_ids, event.finish_reason) == ((WORD,) * 3, None)
    assert len(event.logprobs) == 3
    assert machine.board.generated_tokens == 4
    machine.run()
    assert machine.board.generated_tokens == 9


def test_tokens_after_the_end_of_an_answer_are_dropped(tokenizer: ChatTokenizer) -> None:
    """A stop string, the end token or max_tokens may end an answer in the midst of a step's tokens."""
    word = tokenizer.decode([WORD])
    for name, options, tokens, shown, reason in (
        ("stop", {"stop": (word * 2,)}, (WORD, WORD, WORD), 1, "stop"),
        ("end", {}, (WORD, END, WORD), 2, "stop"),
        ("length", {"max_tokens": 3}, (WORD, WORD), 2, "length"),
    ):
        machine = Machine(tokenizer)
        event = verified(machine, machine.job(name, **{"max_tokens": 9, **options}), *tokens)
        assert (len(event.token_ids), event.finish_reason) == (shown, reason), name
        assert machine.stepper.idle


def test_an_answer_ends_with_the_last_token_that_its_form_allows(tokenizer: ChatTokenizer) -> None:
    machine = Machine(tokenizer)
    event = verified(machine, machine.job("a", max_tokens=9, ignore_eos=True), WORD, WORD, final=True)
    assert (event.text, event.finish_reason) == (tokenizer.decode([WORD] * 2), "stop")
