"""The table of connections, without sockets: who may come in, who has to leave, and when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from fovea.http import address
from fovea.http.address import Proxies, client_key
from fovea.http.patience import Patience
from fovea.http.refusals import PERIOD_S, Notices
from fovea.http.server import CUT_S, Drain, Stage
from fovea.http.settings import HttpSettings
from fovea.http.table import TRIES, Connections, Entry, Phase


@dataclass
class Guest:
    """An owner of a connection that notes what the table asks of it.

    yields: whether it makes room.
    entry: its connection.
    """

    yields: bool = True
    events: list[str] = field(default_factory=list)
    entry: Entry | None = None

    def evict(self, *, cut: bool) -> bool:
        self.events.append("cut off" if cut else "evict")
        if self.yields and self.entry is not None:
            self.entry.set_phase(Phase.ENDED)
        return self.yields

    def is_gone(self) -> None:
        """Close the descriptor of a connection that has made room."""
        assert self.entry is not None
        assert self.entry.phase is Phase.ENDED
        self.entry.table.leave(self.entry)

    def expire(self, now: float) -> None:
        self.events.append("expire")

    def tend(self, now: float) -> None:
        self.events.append("tend")

    def cut(self) -> None:
        self.events.append("cut")

    def shutdown(self) -> None:
        self.events.append("shutdown")

    def abort(self) -> None:
        self.events.append("abort")


@dataclass
class Counts:
    reasons: list[str] = field(default_factory=list)

    def count_refused_connection(self, reason: str) -> None:
        self.reasons.append(reason)

    def count_connection_timeout(self, kind: str) -> None:
        self.reasons.append(kind)


def enter(table: Connections, guest: Guest | None = None, phase: Phase = Phase.HEAD, at: str = "a") -> Entry:
    guest = guest or Guest()
    guest.entry = table.enter(at, guest, phase, 10.0)
    return guest.entry


def test_idle_connections_make_room_first_and_the_oldest_of_them() -> None:
    counts = Counts()
    table = Connections(4, observer=counts)
    guests = [Guest() for _ in range(4)]
    entries = [enter(table, guest) for guest in guests]
    entries[2].set_phase(Phase.IDLE)
    entries[1].set_phase(Phase.IDLE)
    for order in (2, 1, 0, 3):
        assert table.make_room()
        assert guests[order].events == ["evict"]
        guests[order].is_gone()
        enter(table, phase=Phase.ANSWER)
    assert not table.make_room()
    assert counts.reasons == ["evicted_idle"] * 2 + ["evicted_head"] * 2


def test_complete_requests_are_never_closed_for_others() -> None:
    table = Connections(3)
    guests = [Guest() for _ in range(3)]
    for guest in guests:
        enter(table, guest, Phase.ANSWER)
    assert not table.make_room()
    assert not any(guest.events for guest in guests)


def test_order_in_which_phases_make_room() -> None:
    """Bodies and closed connections never made room, so 100 of them kept everybody out for half a minute."""
    order = (Phase.CLOSING, Phase.ANSWERED, Phase.IDLE, Phase.HEAD, Phase.HANDSHAKE, Phase.BODY)
    table = Connections(len(order))
    guests = {phase: Guest() for phase in reversed(order)}
    for phase, guest in guests.items():
        enter(table, guest, phase)
    for phase in order:
        assert table.make_room()
        assert guests[phase].events == ["cut off" if phase is Phase.BODY else "evict"]
        guests[phase].is_gone()
        enter(table, phase=Phase.ANSWER)
    assert not table.make_room()


def test_unread_answers_are_cut_off_before_a_body_is() -> None:
    table = Connections(2)
    unread, body = Guest(yields=False), Guest()
    enter(table, unread, Phase.CLOSING)
    enter(table, body, Phase.BODY)
    assert table.make_room()
    assert unread.events == ["evict", "cut off"]
    assert body.events == ["cut off"]


def test_body_that_makes_progress_makes_room_last() -> None:
    table = Connections(2)
    first, second = Guest(), Guest()
    enter(table, first, Phase.BODY)
    enter(table, second, Phase.BODY)
    assert first.entry is not None
    first.entry.progress()
    assert table.make_room()
    assert (first.events, second.events) == ([], ["cut off"])


def test_connection_is_counted_until_its_descriptor_is_closed() -> None:
    """A TLS connection left the table before its client let it end: 100 in the table were 500 descriptors."""
    table = Connections(2, per_address=2)
    guests = Guest(), Guest()
    for guest in guests:
        enter(table, guest, Phase.IDLE)
    for _ in range(3):
        assert table.make_room()  # in a moment: one is ending, so no other has to
    assert [guest.events for guest in guests] == [["evict"], []]
    assert table.full
    assert not table.accepts("a")
    guests[0].is_gone()
    assert not table.full
    assert table.accepts("a")


def test_connection_that_has_left_stays_away() -> None:
    """The route of a connection that was lost may still end it; that is not a reason to wait for its end."""
    table = Connections(1)
    entry = enter(table, phase=Phase.ANSWER)
    table.leave(entry)
    entry.set_phase(Phase.ENDED)
    enter(table, phase=Phase.ANSWER)
    assert not table.make_room()


def test_connections_that_stay_do_not_hide_others() -> None:
    table = Connections(3 * TRIES)
    for _ in range(3 * TRIES - 1):
        enter(table, Guest(yields=False), Phase.BODY)
    last = Guest()
    enter(table, last, Phase.BODY)
    assert [table.make_room() for _ in range(3)] == [False, False, True]
    assert last.events == ["cut off"]


def test_connection_whose_request_just_arrives_is_passed_over() -> None:
    table = Connections(2)
    arriving, idle = Guest(yields=False), Guest()
    enter(table, arriving, Phase.IDLE)
    enter(table, idle, Phase.IDLE)
    assert table.make_room()
    assert arriving.events == idle.events == ["evict"]
    idle.is_gone()
    assert len(table) == 1


def test_connection_that_was_idle_counts_as_the_youngest_again() -> None:
    table = Connections(2)
    first, second = Guest(), Guest()
    one = enter(table, first, Phase.IDLE)
    enter(table, second, Phase.IDLE)
    one.set_phase(Phase.ANSWER)
    one.set_phase(Phase.IDLE)
    assert table.make_room()
    assert (first.events, second.events) == ([], ["evict"])


def test_end_of_a_connection_is_announced_once() -> None:
    table = Connections(1)
    rooms: list[int] = []
    table.on_room = lambda: rooms.append(len(table))
    entry = enter(table)
    table.leave(entry)
    table.leave(entry)
    assert rooms == [0]
    assert not table.stats()["connections_open"]


def test_limit_per_address() -> None:
    table = Connections(100, per_address=2, exempt=lambda address: address == "proxy")
    one = enter(table, at="a")
    enter(table, at="a")
    assert not table.accepts("a")
    assert table.accepts("b")
    table.leave(one)
    assert table.accepts("a")
    for _ in range(5):
        enter(table, at="proxy")
    assert table.accepts("proxy")
    assert Connections(1).accepts("a")


def test_sweep_tells_those_that_are_late() -> None:
    table = Connections(10)
    early, late, unread, unwritten = Guest(), Guest(), Guest(), Guest()
    enter(table, early).set_phase(Phase.HEAD, 5.0)
    enter(table, late).set_phase(Phase.HEAD, 2.0)
    enter(table, unread, Phase.ANSWER).set_phase(Phase.ANSWER)
    enter(table, unwritten, Phase.ANSWER).set_phase(Phase.ANSWER)
    for entry in table:
        entry.unread = entry.owner is unread
        entry.write_deadline = 2.0 if entry.owner is unwritten else math.inf
    table.sweep(3.0)
    found = [guest.events for guest in (early, late, unread, unwritten)]
    assert found == [[], ["expire"], ["tend"], ["expire"]]


def test_addresses_of_one_network_count_together() -> None:
    assert client_key("192.0.2.1") == "192.0.2.1"
    assert client_key("::ffff:192.0.2.1") == "192.0.2.1"
    assert client_key("2001:db8:1:2:3::4") == client_key("2001:db8:1:2::9")
    assert client_key("2001:db8:1:2::1") != client_key("2001:db8:1:3::1")
    assert client_key("fe80::1%eth0") == client_key("fe80::2")


def test_only_the_last_hop_before_trusted_proxies_is_believed() -> None:
    """The left part of X-Forwarded-For is whatever the client wrote."""
    proxies = Proxies(("10.0.0.0/8", "2001:db8::1"))

    def forwarded(*values: str) -> str | None:
        return proxies.client([(b"x-forwarded-for", value.encode()) for value in values])

    assert "10.1.2.3" in proxies
    assert "192.0.2.1" not in proxies
    assert "192.0.2.1" not in Proxies(())
    assert forwarded("1.1.1.1, 192.0.2.7") == "192.0.2.7"
    assert forwarded("1.1.1.1, 192.0.2.7, 10.0.0.5") == "192.0.2.7"
    assert forwarded("1.1.1.1", "192.0.2.7") == "192.0.2.7"
    assert forwarded("1.1.1.1, nonsense") is None
    assert forwarded("10.0.0.5") is None
    assert forwarded() is None


def test_x_forwarded_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB of trusted addresses in each request kept the event loop busy for 25 ms."""
    parsed: list[str] = []
    parse = address.as_address
    monkeypatch.setattr(address, "as_address", lambda host: parsed.append(host) or parse(host))
    proxies = Proxies(("10.0.0.0/8",))
    name = b"x-forwarded-for"
    assert proxies.client([(name, b"192.0.2.7," + b",".join([b"10.0.0.7"] * 7000))]) is None
    assert proxies.client([(name, b"192.0.2.7")] + [(name, b"10.0.0.7")] * 90) is None
    assert len(parsed) == 2 * address.HOPS
    hops = b",".join([b"6.6.6.6", b"192.0.2.7"] + [b"10.0.0.7"] * (address.HOPS - 1))
    assert proxies.client([(name, hops)]) == "192.0.2.7"
    assert proxies.client([(name, b":" * 60_000)]) is None


def test_patience_is_used_up_by_waiting_and_given_back_by_bytes() -> None:
    patience = Patience(10.0, rate=100.0)
    assert patience.resume(0.0, 0) == 10.0
    assert patience.charge(10.0, 0) == 10.0  # all of it is used up
    assert patience.charge(10.0, 500) == 15.0
    assert patience.charge(12.0, 100_000) == 22.0  # never more than at the start
    patience.skip(100.0)
    assert patience.charge(112.0, 100_000) == 122.0
    assert patience.charge(115.0, 100_100) == 123.0


def test_notices_are_one_line_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    notices = Notices(lambda: now[0])
    for _ in range(5):
        notices.warn("kind", "text")
    notices.warn("other", "text")
    now[0] = PERIOD_S
    notices.warn("kind", "text")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["text", "text", "text (and 4 more of this kind before)"]


def test_drain_without_running_requests_lasts_as_long_as_the_lame_duck_time() -> None:
    drain = Drain()
    assert drain.advance(0.0, 5) is Stage.SERVING
    drain.begin(0.0, drain_s=30.0, lame_duck_s=5.0)
    assert drain.advance(4.9, 0) is Stage.DRAINING
    assert drain.advance(5.0, 0) is Stage.ENDED


def test_drain_waits_for_running_requests_and_then_cuts_them() -> None:
    drain = Drain()
    drain.begin(0.0, drain_s=30.0, lame_duck_s=5.0)
    assert drain.advance(29.9, 1) is Stage.DRAINING
    assert drain.advance(30.0, 1) is Stage.CUTTING
    assert drain.advance(30.1, 1) is Stage.CUTTING
    assert drain.advance(30.1, 0) is Stage.ENDED


def test_drain_does_not_wait_forever_for_those_that_were_cut() -> None:
    drain = Drain()
    drain.begin(0.0, drain_s=0.0, lame_duck_s=5.0)
    assert drain.advance(0.0, 1) is Stage.CUTTING
    assert drain.advance(CUT_S + 0.1, 1) is Stage.CUTTING  # the port stays open for the lame-duck time
    assert drain.advance(5.0, 1) is Stage.ENDED


def test_second_signal_cuts_now() -> None:
    drain = Drain()
    drain.hurry(0.0)
    assert drain.advance(0.0, 0) is Stage.SERVING
    drain.begin(0.0, drain_s=600.0, lame_duck_s=60.0)
    assert drain.advance(1.0, 1) is Stage.DRAINING
    drain.hurry(1.0)
    assert drain.advance(1.0, 1) is Stage.CUTTING
    assert drain.advance(1.0, 0) is Stage.ENDED


def test_idle_time_is_longer_than_that_of_usual_clients() -> None:
    """A client must notice first that a connection is old; nginx and load balancers reuse them for 60 s."""
    assert HttpSettings().keep_alive_s > 60
