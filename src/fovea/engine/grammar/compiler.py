"""Compiles the forms of answers in a thread of its own, and keeps the latest results.

A request waits for its grammar as it waits for its images: the engine's steps and the other requests go on.
The library releases the interpreter lock while it compiles. Before that, each form is compiled in a separate
process with limits on time and memory (`trial`), so that the compilation here is short.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest, Overloaded, Unavailable
from fovea.core.measure import stage
from fovea.core.types import Client
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
"""Number of forms of one client that wait to be compiled; more are refused."""
MOST_OF_KEY = 256
"""Number of forms of one key that wait, those of all clients behind a gateway together."""


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


class FormQueue:
    """The forms that wait to be compiled. Keys take turns, and within a key its clients.

    Before each form of a client, at most one form of each other client of its key is compiled, and before
    each form of a key at most one of each other key. So many costly forms of one do not delay all.
    A form that several clients wait for is in the turns of each. Not thread-safe.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[str, OrderedDict[str, deque[tuple[AnswerFormat, Future[Grammar]]]]] = (
            OrderedDict()
        )

    def add(self, form: AnswerFormat, future: Future[Grammar], client: Client) -> None:
        """Add a form to the turns of a client, unless it is there. Raises Overloaded if it has too many."""
        key, name = client
        clients = self._keys.get(key) or OrderedDict()
        mine = clients.get(name, ())
        if any(waiting is future for _, waiting in mine):
            return
        of_key = sum(map(len, clients.values()))
        for owner, count, most in (("client", len(mine), MOST_WAITING), ("key", of_key, MOST_OF_KEY)):
            if count >= most:
                raise Overloaded(
                    f"{count} forms of this {owner} wait to be compiled; accepted: at most {most}",
                    retry_after=1.0,
                    scope="request",
                )
        self._keys.setdefault(key, OrderedDict()).setdefault(name, deque()).append((form, future))

    def take(self) -> tuple[AnswerFormat, Future[Grammar]] | None:
        """Return the next form, which another thread may have compiled meanwhile; None: nobody waits."""
        if not self._keys:
            return None
        key, clients = self._keys.popitem(last=False)
        name, mine = clients.popitem(last=False)
        taken = mine.popleft()
        if mine:
            clients[name] = mine
        if clients:
            self._keys[key] = clients
        return taken


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
        self._known: OrderedDict[AnswerFormat, tuple[Future[Grammar], Client]] = OrderedDict()
        self._queue = FormQueue()
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, "fovea-grammar")
        self._trial = Trial()

    def compile(self, form: AnswerFormat, client: Client = ("", "")) -> Future[Grammar]:
        """Return a future of the grammar. Requests with equal forms share it. Thread-safe.

        client: see `GenerationRequest.client`.
        The future raises InvalidRequest for a form that is not supported; see `explain`.

        Raises Overloaded if too many forms of the client wait, Unavailable after `close`.
        """
        with self._lock:
            future, _ = self._known.get(form, (None, client))
            known = future is not None and not _failed_for_now(future)
            if future is None or not known:
                future = Future()
            if not future.done() and not future.running():
                self._queue.add(form, future, client)
                try:
                    self._thread.submit(self._take_turn)
                except RuntimeError:
                    raise Unavailable("the engine has stopped") from None
            self.hits += known
            self.misses += not known
            self._known[form] = future, client
            self._known.move_to_end(form)
            if len(self._known) > MOST_KEPT:
                self._forget_one()
            return future

    def close(self) -> None:
        """Stop the thread. Forms that wait are not compiled any more."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            while (waiting := self._queue.take()) is not None:
                waiting[1].cancel()
        self._trial.close()

    def _forget_one(self) -> None:
        """Remove the oldest form of the client with the most forms, so that a client evicts only its own."""
        counts = Counter(client for _, client in self._known.values())
        largest = max(counts, key=counts.__getitem__)
        del self._known[next(form for form, (_, client) in self._known.items() if client == largest)]

    def _take_turn(self) -> None:
        """Compile the form whose turn it is. There is a call for each entry of the queue."""
        with self._lock:
            turn = self._queue.take()
        if turn is None or turn[1].done() or not turn[1].set_running_or_notify_cancel():
            return
        form, future = turn
        try:
            future.set_result(self._compile(form))
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)

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
