"""Forms of answers are compiled in turn: one client's costly forms do not delay those of others."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import Overloaded
from fovea.engine.grammar.compiler import MOST_KEPT, MOST_OF_KEY, MOST_WAITING, FormQueue, GrammarCompiler

Client = tuple[str, str]


def form(number: int) -> AnswerFormat:
    return AnswerFormat.regex(f"a{{{number + 1}}}")


def filled(clients: list[Client]) -> FormQueue:
    queue = FormQueue()
    for number, client in enumerate(clients):
        queue.add(form(number), Future(), client)
    return queue


def order(queue: FormQueue, clients: list[Client]) -> list[Client]:
    owners = {form(number): client for number, client in enumerate(clients)}
    out = []
    while (turn := queue.take()) is not None:
        out.append(owners[turn[0]])
    return out


CLIENTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), max_size=40)


@given(CLIENTS)
def test_keys_take_turns_and_within_a_key_its_clients(clients: list[Client]) -> None:
    """Before a client's next form, no other key has more than one, and no client of its key, either."""
    queue, taken = filled(clients), order(filled(clients), clients)
    assert Counter(taken) == Counter(clients)
    assert order(queue, clients) == taken
    for key in "abc":
        turns = [at for at, (owner, _) in enumerate(taken) if owner == key]
        for before, after in zip([-1, *turns], turns, strict=False):
            others = Counter(owner for owner, _ in taken[before + 1 : after])
            assert all(count <= 1 for count in others.values())
        own = [name for owner, name in taken if owner == key]
        for name in set(own):
            places = [at for at, one in enumerate(own) if one == name]
            for before, after in zip([-1, *places], places, strict=False):
                assert all(count <= 1 for count in Counter(own[before + 1 : after]).values())


def test_a_client_can_only_fill_its_own_part() -> None:
    """A full client gets 429 for this request; others are accepted, and its pending forms stay shared."""
    queue = filled([("a", "")] * MOST_WAITING)
    with pytest.raises(Overloaded, match="64 forms of this client wait") as caught:
        queue.add(form(99), Future(), ("a", ""))
    assert caught.value.scope == "request"
    queue.add(form(99), Future(), ("b", ""))
    gateway = filled([("g", str(number % 32)) for number in range(MOST_OF_KEY)])
    with pytest.raises(Overloaded, match="256 forms of this key wait"):
        gateway.add(form(999), Future(), ("g", "new"))


def test_a_client_with_many_forms_evicts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a form that another client uses again and again would have to be compiled each time."""
    compiler = GrammarCompiler(lambda: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(compiler, "_compile", lambda _: SimpleNamespace(broken=False))
    first = compiler.compile(form(0), ("b", ""))
    for number in range(1, 3 * MOST_KEPT):
        compiler.compile(form(number), ("a", "")).result(10)
    assert compiler.compile(form(0), ("b", "")) is first
    assert compiler.hits == 1
    assert len(compiler._known) == MOST_KEPT
    compiler.close()


def test_a_small_form_waits_for_one_costly_form_of_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key's costly schemas once delayed another key's small one from 0.05 to 9 seconds."""
    compiler = GrammarCompiler(lambda: None)  # type: ignore[arg-type,return-value]
    done: list[AnswerFormat] = []
    begun, goes_on = Event(), Event()

    def work(one: AnswerFormat) -> Any:
        begun.set()
        goes_on.wait(10)
        done.append(one)
        return one

    monkeypatch.setattr(compiler, "_compile", work)
    costly = [compiler.compile(form(number), ("a", "")) for number in range(40)]
    assert begun.wait(10)
    small, shared = compiler.compile(form(100), ("b", "")), compiler.compile(form(30), ("c", ""))
    assert shared is costly[30], "a form that another client has asked for is in the turns of both"
    goes_on.set()
    small.result(10)
    shared.result(10)
    assert done.index(form(100)) <= 2
    assert done.index(form(30)) <= 4
    costly[-1].result(10)
    assert Counter(done) == Counter([form(number) for number in (*range(40), 100)])
    compiler.close()
