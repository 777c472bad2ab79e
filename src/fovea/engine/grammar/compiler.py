"""Compiles the forms of answers in a thread of its own, and keeps the latest results.

A request waits for its grammar as it waits for its images: the engine's steps and the other requests go on.
The library releases the interpreter lock while it compiles. Before that, each form is compiled in a separate
process with limits on time and memory (`trial`), so that the compilation here is short.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from fovea.core.answer_format import AnswerFormat
from fovea.core.errors import InvalidRequest, Overloaded, Unavailable
from fovea.core.stage import stage
from fovea.engine.grammar.definition import compile_format
from fovea.engine.grammar.guide import Ahead, Guide
from fovea.engine.grammar.trial import Trial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_TOOL = re.compile(r"tools\[\d+\]\.function\.parameters")
MOST_KEPT = 64
"""Number of forms whose grammars are kept. A hostile one may come to take 40 MB while it is used."""
SLOWEST_MASK_S = 0.1
"""Longest time of a form's first mask, which other forms wait for."""
MOST_FIRST = 16
"""Most forced tokens at the beginning of an answer that are found when its form is compiled."""
MOST_WAITING = 64
"""Number of forms that wait to be compiled; more are refused."""


class Grammar:
    """A compiled form, which several answers may follow at a time.

    first: the tokens with which an answer may begin; None: each guide finds them.
    broken: whether an answer exceeded the library's limits. What the library has learnt is shared by all
        answers, so the others would exceed them, too; the form has to be compiled again.
    """

    def __init__(self, matcher: LLMatcher, kind: str = "format") -> None:
        """kind: kind of the form, for errors."""
        self._matcher = matcher
        self._kind = kind
        self.first: Ahead | None = None
        self.broken = False

    def guide(self, after: tuple[int, ...] = ()) -> Guide:
        """Return a new guide, which is at the beginning of an answer. after: see `Guide`."""
        return Guide(self._matcher.deep_copy(), self._kind, self._break, after)

    def _break(self) -> None:
        self.broken = True


class GrammarCompiler:
    """The grammars of the forms that requests named lately.

    hits, misses: how often a form was known, and how often it was not.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        """vocabulary: returns the model's vocabulary; it is called once, in the compiler's thread."""
        self.hits = 0
        self.misses = 0
        self._load = vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[AnswerFormat, Future[Grammar]] = OrderedDict()
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "fovea-grammar")
        self._trial = Trial()

    def compile(self, form: AnswerFormat) -> Future[Grammar]:
        """Return a future of the grammar. Requests with equal forms share it. Thread-safe.

        The future raises InvalidRequest for a form that is not supported; see `explain`.

        Raises Overloaded if too many forms wait, Unavailable after `close`.
        """
        with self._lock:
            known = self._known.get(form)
            if known is not None and not _failed_for_now(known):
                self.hits += 1
                self._known.move_to_end(form)
                return known
            waiting = sum(not future.done() for future in self._known.values())
            if waiting >= MOST_WAITING:
                raise Overloaded(f"{waiting} answer formats wait to be compiled", retry_after=1.0)
            self.misses += 1
            try:
                future = self._thread.submit(self._compile, form)
            except RuntimeError:
                raise Unavailable("the engine has stopped") from None
            self._known[form] = future
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
            return future

    def close(self) -> None:
        """Stop the thread. Forms that wait are not compiled any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._trial.close()

    def _compile(self, form: AnswerFormat) -> Grammar:
        with stage("grammar"):
            self._trial.check(form)
            if self._vocabulary is None:
                self._vocabulary = self._load()
            grammar = Grammar(compile_format(form, self._vocabulary), form.kind)
            started = time.perf_counter()
            grammar.first = grammar.guide().look((), (), None, MOST_FIRST)
            if time.perf_counter() - started > SLOWEST_MASK_S:
                raise InvalidRequest(
                    f"{form.kind}: its first mask takes more than {SLOWEST_MASK_S:g} seconds",
                    code="unsupported_format",
                )
            return grammar


def _failed_for_now(future: Future[Grammar]) -> bool:
    """Whether a form has no usable grammar for a reason other than the form itself."""
    if not future.done():
        return False
    if future.cancelled() or not isinstance(error := future.exception(), InvalidRequest | None):
        return True
    return error is None and future.result().broken


def explain(error: InvalidRequest, form: AnswerFormat) -> InvalidRequest:
    """Return an error of a shared future as the error of one request, which names the request's own field."""
    if form.kind == "calls":  # its message names the tool
        place = _TOOL.match(error.message)
        return InvalidRequest(error.message, param=place[0] if place else form.param, code=error.code)
    return InvalidRequest(f"{form.param}: {error.message}", param=form.param, code=error.code)
