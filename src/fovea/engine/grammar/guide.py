"""Follows answers through their grammars: which tokens may come next, and which must.

Some grammars need a second for a token, so guides work in threads of their own, beside the steps. When a
step has chosen tokens, the guide of their answer reads them, and looks which tokens may follow. The step
waits for its guides for a few milliseconds, all together, but not for one that was late before. An answer
whose guide is late is left out of the next steps until its guide is ready, and the other answers go on. An
answer whose guide needs longer than LONGEST_LOOK_S ends alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fovea.core.errors import InvalidRequest
from fovea.engine.sequence import NO_DRAFTS, Drafts, Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from fovea.engine.grammar.compiler import Grammar

WORD = 32
"""Tokens per number of a mask."""
THREADS, SLOW_THREADS = 16, 2
"""Guides that look at a time, and how many of those that were late: they share the machine with the model."""
NICENESS = 5
"""How far the priority of guides' threads is below that of the model, for which every request waits."""
GRACE_S = 0.03
"""Seconds for which a step waits for its guides. Most need less than one millisecond."""
DRAFTS_S = 0.005
"""Seconds for the masks of proposed tokens in a look. With slower grammars one token is proposed, or none."""
LONGEST_LOOK_S = 1.0
"""Most seconds that a guide may work on the tokens of one step."""


class Ahead(NamedTuple):
    """The tokens that may follow an answer, as its guide found them.

    length: number of the answer's tokens.
    complete: number of the step's new tokens with which the answer is complete; None: it is not.
    drafts: tokens that are expected next: first those that follow in any case.
    masks: allowed tokens after the answer, and after each draft, as `Masks.bits`; empty: all tokens.
    """

    length: int
    complete: int | None
    drafts: Drafts
    masks: list[NDArray[np.int32]]


class Guide:
    """The place of one answer in its grammar.

    kind: kind of the form, for errors.
    on_failure: called if the library gives up; what it has learnt for the grammar is unusable then.
    after: tokens that end the model's reasoning. The grammar begins after them; (): with the answer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        kind: str,
        on_failure: Callable[[], None] = lambda: None,
        after: tuple[int, ...] = (),
    ) -> None:
        self.matcher = matcher
        self.kind = kind
        self._on_failure = on_failure
        self._after = after
        self._begin = None if after else 0
        self._read = 0

    @property
    def waits(self) -> bool:
        """Whether the model is still reasoning. Every token is allowed until then."""
        return self._begin is None

    def read(self, answer: Seq[int]) -> None:
        """Go to the end of an answer. It may be shorter than before: a step that failed is tried again.

        Raises InvalidRequest if the grammar became too complex, or does not allow the answer.
        """
        if self._after and (self._begin is None or len(answer) < self._begin):
            self._begin = _end_of(self._after, answer)
        answer = answer[len(answer) if self._begin is None else self._begin :]
        if len(answer) < self._read:
            self.matcher.rollback(self._read - len(answer))
        elif len(answer) > self._read:
            self.matcher.consume_tokens(list(answer[self._read :]))
        self._read = len(answer)
        self.check()

    def look(
        self,
        answer: Seq[int],
        new: Seq[int],
        drafts: Seq[int] | None,
        most: int,
        proposed: Drafts = NO_DRAFTS,
    ) -> Ahead:
        """Read an answer and new tokens, up to the end of the answer, and find what may follow.

        drafts: tokens that the next step computes in any case; None: those that must follow, at most `most`,
            and after them proposed ones.
        proposed: tokens that a drafter expects. They are cut where the grammar does not allow them.

        Raises InvalidRequest as `read`.
        """
        answer = list(answer)
        self.read(answer)
        for count, token in enumerate(new, 1):
            answer.append(token)
            self.read(answer)
            if self.ended:
                return Ahead(len(answer), count, NO_DRAFTS, [])
        if self.waits:
            return Ahead(len(answer), None, self._while_waiting(proposed), [])
        expected = Drafts(drafts) if drafts is not None else self._expected(proposed, most)
        masks, began = [self._mask()], time.perf_counter()
        for count, draft in enumerate(expected.tokens):
            # What must follow is cheap. Proposed tokens are left out if a grammar takes long for each.
            spent = time.perf_counter() - began
            if drafts is None and count >= expected.forced and spent > DRAFTS_S:
                break
            if not self.matcher.try_consume_tokens([draft]):
                break
            masks.append(self._mask())
        self.matcher.rollback(len(masks) - 1)
        self.check()
        if drafts is None:
            allowed = len(masks) - 1
            expected = expected._replace(tokens=expected.tokens[:allowed], chances=expected.chances[:allowed])
        return Ahead(len(answer), None, expected, masks)

    def _while_waiting(self, proposed: Drafts) -> Drafts:
        """Return the drafts that end before the grammar may begin: what follows them needs no mask."""
        last = self._after[-1]
        count = next((at for at, token in enumerate(proposed.tokens) if token == last), len(proposed.tokens))
        return proposed._replace(tokens=proposed.tokens[:count], chances=proposed.chances[:count])

    def _expected(self, proposed: Drafts, most: int) -> Drafts:
        """Return the tokens that must follow, and after them those of a proposal that agrees with them."""
        forced = self.forced[:most] if most else []
        count, rest = len(forced), list(proposed.tokens)
        if not count:
            return proposed
        if rest[:count] != forced or len(rest) == count:
            return Drafts.certain(forced)
        before = proposed.chances[count - 1]
        chances = [1.0] * count + [chance / before for chance in proposed.chances[count:]]
        return Drafts(forced + rest[count:], chances, count, proposed.drafter)

    def _mask(self) -> NDArray[np.int32]:
        return np.frombuffer(self.matcher.compute_bitmask(), np.int32)

    def check(self) -> None:
        """Raise InvalidRequest if the library has given up."""
        if self.matcher.is_error():
            self._on_failure()
            raise InvalidRequest(
                f"the answer's format failed at token {self._read}: {self.matcher.get_error()[:300]}",
                code="format_failed",
            )

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and the grammar allows no further token."""
        stopped: bool = not self.waits and self.matcher.is_stopped()
        return stopped

    @property
    def forced(self) -> list[int]:
        """The tokens that come next in any case, as the tokenizer would write them."""
        tokens: list[int] = [] if self.waits else self.matcher.compute_ff_tokens()
        return tokens


def _end_of(part: tuple[int, ...], tokens: Seq[int]) -> int | None:
    """The place after the first occurrence of some tokens among others; None: there is none."""
    for end in range(len(part), len(tokens) + 1):
        if tuple(tokens[end - len(part) : end]) == part:
            return end
    return None


class Masks(NamedTuple):
    """The allowed tokens of some rows of logits.

    rows: numbers of these rows.
    bits: (len(rows), words) int32. Bit t % 32 of word t // 32 is 1 if token t is allowed.
    """

    rows: list[int]
    bits: NDArray[np.int32]

    @classmethod
    def of(cls, places: Seq[tuple[int, NDArray[np.int32]]], size: int) -> Masks:
        """Return the masks of rows for `size` logits. The vocabulary of a mask may be smaller."""
        bits = np.zeros((len(places), -(-size // WORD)), dtype=np.int32)
        for index, (_, mask) in enumerate(places):
            bits[index, : len(mask)] = mask[: bits.shape[1]]
        return cls([row for row, _ in places], bits)

    def allows(self, index: int, token: int) -> bool:
        """Whether a token is allowed. index: place of the row in `rows`."""
        return bool(self.bits[index, token // WORD] >> token % WORD & 1)

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """Return the masks as (len(rows), size) booleans. size: number of logits."""
        bits = np.unpackbits(self.bits.view(np.uint8), axis=1, count=None, bitorder="little")
        return bits[:, :size].view(np.bool_)


def lower_priority() -> None:
    """Let the other threads of this process go before this one. Only on Linux a thread has a priority."""
    if sys.platform == "linux":
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice + NICENESS)


def thread_time(thread: int) -> float:
    """Return the processor time of a thread that lives, in seconds. thread: its `threading.get_ident()`."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class _Look:
    """One look of a guide, which waits for a thread, is at work, or is done.

    seconds: processor time that it took.
    """

    def __init__(self, clock: Callable[[int], float]) -> None:
        self.future: Future[Ahead] = Future()
        self.seconds = 0.0
        self._clock = clock
        self._started: tuple[int, float] | None = None

    def run(self, look: Callable[[], Ahead], previous: _Look | None) -> None:
        if previous is not None:
            wait([previous.future])
        thread = threading.get_ident()
        self._started = thread, self._clock(thread)
        try:
            found = look()
        except BaseException as error:  # noqa: BLE001 - a panic of the library is not an Exception
            self.future.set_exception(error)
        else:
            self.seconds = self._clock(thread) - self._started[1]
            self.future.set_result(found)

    @property
    def too_long(self) -> bool:
        """Whether it takes more processor time than it may. Waiting for a processor does not count."""
        if self._started is None:
            return False
        thread, began = self._started
        return self._clock(thread) - began > LONGEST_LOOK_S


class Guides:
    """The guides of all answers that are being generated and have a grammar. For one thread.

    most_drafts: most forced tokens after an answer that are found; 0: none.
    clock: returns the processor time of a thread, for the longest look.
    """

    def __init__(self, most_drafts: int = 0, clock: Callable[[int], float] = thread_time) -> None:
        self.most_drafts = most_drafts
        self._clock = clock
        self._guides: dict[str, Guide] = {}
        self._looks: dict[str, _Look] = {}
        self._slow: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._slow_threads: ThreadPoolExecutor | None = None

    def add(self, name: str, grammar: Grammar, after: tuple[int, ...] = ()) -> None:
        """Start the guide of a sequence. name: its id. after: see `Guide`."""
        self._guides[name] = grammar.guide(after)
        if grammar.first is None or after:
            self.look(name, ())
        else:
            self._looks[name] = first = _Look(self._clock)
            first.future.set_result(grammar.first)

    def remove(self, name: str) -> None:
        self._guides.pop(name, None)
        self._looks.pop(name, None)
        self._slow.discard(name)

    def __len__(self) -> int:
        return len(self._guides)

    def __contains__(self, name: object) -> bool:
        return name in self._guides

    def look(
        self,
        name: str,
        answer: Seq[int],
        new: Seq[int] = (),
        drafts: Seq[int] | None = None,
        proposed: Drafts = NO_DRAFTS,
    ) -> None:
        """Let the guide of a sequence look in its thread. The arguments are those of `Guide.look`."""
        if self._threads is None or self._slow_threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "fovea-guide", lower_priority)
            self._slow_threads = ThreadPoolExecutor(SLOW_THREADS, "fovea-slow-guide", lower_priority)
        guide, look, most = self._guides[name], _Look(self._clock), self.most_drafts
        answer, new = list(answer), list(new)  # the engine's thread changes them
        threads = self._slow_threads if name in self._slow else self._threads
        threads.submit(
            look.run, lambda: guide.look(answer, new, drafts, most, proposed), self._looks.get(name)
        )
        self._looks[name] = look

    def wait(self, names: Collection[str]) -> None:
        """Wait until the guides of some sequences are ready, but not longer than GRACE_S.

        A guide that was late is not waited for until it is fast again.
        """
        looks = ((name, self._looks[name].future) for name in names if name not in self._slow)
        pending = {name: future for name, future in looks if not future.done()}
        if pending:
            wait(pending.values(), GRACE_S)
            self._slow.update(name for name, future in pending.items() if not future.done())

    def ahead(self, name: str) -> Ahead | None:
        """Return what the guide of a sequence found; None: it is late.

        Raises its error, and InvalidRequest if it takes too long.
        """
        look = self._looks[name]
        if look.future.done():
            if look.seconds < GRACE_S:
                self._slow.discard(name)
            return look.future.result()
        if look.too_long:
            raise InvalidRequest(
                f"the answer's format failed: a token takes more than {LONGEST_LOOK_S:g} s, because the "
                f"{self._guides[name].kind} is too ambiguous; accepted: one by which a text can be read in "
                "few ways",
                code="format_failed",
            )
        return None

    def masks(
        self, rows: Seq[tuple[Sequence, int]], size: int, failures: dict[str, Exception]
    ) -> tuple[Masks | None, set[str]]:
        """Return the masks of the rows whose sequences have a grammar, and the ids of late sequences.

        None: no row has a mask.

        rows: sequence, and number of its drafts before the row; in any order.
        size: number of logits.
        failures: gets the error of each sequence whose grammar fails, by sequence id; it has no mask.
        """
        if not self._guides:
            return None, set()
        sequences = {seq.id: seq for seq, _ in rows if seq.id in self._guides}
        for seq in sequences.values():
            if not self._is_current(seq):  # a step that failed is tried again, for example
                self.look(seq.id, seq.output_ids, (), list(seq.drafts))
        self.wait(sequences)
        found: dict[str, Ahead] = {}
        late = set()
        for name in sequences:
            try:
                ahead = self.ahead(name)
            except Exception as error:  # noqa: BLE001 - any error fails this sequence alone
                failures[name] = error
            else:
                if ahead is None:
                    late.add(name)
                else:
                    found[name] = ahead
        places = [
            (number, found[seq.id].masks[drafts])
            for number, (seq, drafts) in enumerate(rows)
            if seq.id in found and drafts < len(found[seq.id].masks)
        ]
        return (Masks.of(places, size) if places else None), late

    def _is_current(self, seq: Sequence) -> bool:
        """Whether the latest look of a guide is behind the answer and the drafts, or not done yet."""
        future = self._looks[seq.id].future
        if not future.done() or future.exception() is not None:
            return True
        ahead = future.result()
        return ahead.length == len(seq.output_ids) and (
            not ahead.masks or list(ahead.drafts.tokens[: len(seq.drafts)]) == seq.drafts
        )
