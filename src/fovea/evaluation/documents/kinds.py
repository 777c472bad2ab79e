"""The kinds of documents: each makes random facts for one document of its kind."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import Random

from fovea.evaluation.documents import vocabulary as v
from fovea.evaluation.documents.content import Content, Series, Sort, Table
from fovea.evaluation.documents.maker import STATES, Maker, items, sums, value_table

JOBS = v.listed(
    "engineer teacher nurse driver clerk cook farmer painter lawyer pilot baker writer analyst designer"
)
PAYMENTS = v.listed("cash,card,Visa,Mastercard,voucher,invoice,bank transfer,debit card", ",")


def invoice(rng: Random) -> Content:
    maker = Maker(rng)
    issued = v.day(rng)
    maker.add("invoice_number", v.number_code(rng), "code")
    maker.add("invoice_date", maker.locale.date(issued), "date")
    maker.sometimes(
        0.7, "due_date", maker.locale.date(issued + timedelta(days=rng.choice((7, 14, 30, 45)))), "date"
    )
    maker.add("customer", v.company(rng) if rng.random() < 0.6 else v.person(rng))
    maker.sometimes(0.45, "order_number", v.number_code(rng), "code")
    maker.sometimes(0.35, "customer_number", v.number_code(rng), "code")
    maker.sometimes(0.4, "vat_id", v.code(rng, "AA999999999"), "code")
    maker.sometimes(0.35, "iban", v.code(rng, "AA99 9999 9999 9999 9999"), "code")
    maker.sometimes(0.3, "phone", v.phone(rng), "code")
    maker.sometimes(0.3, "email", v.email(rng))
    maker.sometimes(0.2, "terms", rng.choice(("30 days net", "14 days", "on receipt", "60 days net")))
    table, net = items(maker, 1, 9, rng.choice(("full", "full", "priced", "short")))
    sums(maker, net)
    title = rng.choice(("Invoice", "INVOICE", "Tax invoice", "Bill", v.company(rng)))
    note = (v.sentence(rng),) if rng.random() < 0.4 else ()
    return maker.content("invoice", title, table, paragraphs=note)


def receipt(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("date", maker.date(), "date")
    maker.sometimes(0.8, "time", v.clock(rng))
    maker.sometimes(0.7, "receipt_number", v.number_code(rng), "code")
    maker.sometimes(0.4, "cashier", v.name(rng))
    maker.sometimes(0.4, "till", str(rng.randint(1, 40)), "number")
    maker.sometimes(0.3, "phone", v.phone(rng), "code")
    table, net = items(maker, 2, 11, rng.choice(("short", "short", "priced")))
    sums(maker, net)
    maker.sometimes(0.7, "paid_by", rng.choice(PAYMENTS))
    maker.sometimes(0.3, "change", maker.locale.amount(rng.randint(5, 4_000)), "amount")
    note = (v.sentence(rng, 3, 7),) if rng.random() < 0.5 else ()
    return maker.content("receipt", v.company(rng), table, paragraphs=note)


def form(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("name", v.person(rng))
    extras: tuple[tuple[str, Callable[[], str], Sort], ...] = (
        ("birth_date", maker.date, "date"),
        ("birth_place", lambda: v.name(rng), "text"),
        ("street", lambda: v.street(rng), "text"),
        ("city", lambda: v.city(rng), "text"),
        ("phone", lambda: v.phone(rng), "code"),
        ("email", lambda: v.email(rng), "text"),
        ("nationality", lambda: v.name(rng) + rng.choice(("ia", "land", "stan")), "text"),
        ("member_number", lambda: v.number_code(rng), "code"),
        ("employer", lambda: v.company(rng), "text"),
        ("occupation", lambda: rng.choice(JOBS), "text"),
        ("department", lambda: v.name(rng), "text"),
        ("room", lambda: v.code(rng, "A 999"), "code"),
        ("doctor", lambda: "Dr. " + v.name(rng), "text"),
        ("blood_type", lambda: rng.choice(("A", "B", "AB", "O")) + rng.choice("+-"), "text"),
        ("signed_on", maker.date, "date"),
    )
    for key, make, sort in rng.sample(extras, rng.randint(4, 11)):
        maker.add(key, make(), sort)
    title = rng.choice(("Application form", "Registration", "Membership", "Visitor form", v.heading(rng)))
    notes = tuple(v.sentence(rng) for _ in range(rng.choice((0, 0, 1, 2))))
    return maker.content("form", title, paragraphs=notes)


def report(rng: Random) -> Content:
    maker = Maker(rng)
    maker.sometimes(0.6, "date", maker.date(), "date")
    maker.sometimes(0.4, "author", v.person(rng))
    maker.sometimes(0.3, "reference", v.number_code(rng), "code")
    maker.sometimes(0.3, "department", v.name(rng))
    maker.sometimes(0.2, "project", v.name(rng))
    table = value_table(rng, maker.locale, rng.randint(3, 14), rng.randint(2, 5))
    notes = tuple(v.sentence(rng) for _ in range(rng.choice((0, 1, 1, 2))))
    return maker.content("table", v.heading(rng), table, paragraphs=notes)


def article(rng: Random) -> Content:
    maker = Maker(rng)
    maker.sometimes(0.8, "author", v.person(rng))
    maker.sometimes(0.7, "published", maker.date(), "date")
    maker.sometimes(0.4, "section", v.name(rng))
    paragraphs = tuple(
        " ".join(v.sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(2, 5))
    )
    return maker.content("article", v.heading(rng), paragraphs=paragraphs)


def dashboard(rng: Random) -> Content:
    maker = Maker(rng)
    figures: tuple[tuple[str, Callable[[], str]], ...] = (
        ("revenue", maker.amount),
        ("orders", lambda: maker.locale.count(rng.randint(3, 90_000))),
        ("visitors", lambda: maker.locale.count(rng.randint(3, 90_000))),
        ("users", lambda: maker.locale.count(rng.randint(3, 90_000))),
        ("errors", lambda: str(rng.randint(0, 999))),
        ("uptime", lambda: f"{rng.randint(0, 99)}.{rng.randint(0, 9)} %"),
        ("latency", lambda: f"{rng.randint(3, 990)} ms"),
        ("refunds", maker.amount),
        ("budget", maker.amount),
        ("memory", lambda: f"{rng.randint(1, 512)} GB"),
    )
    for key, make in rng.sample(figures, rng.randint(3, 7)):
        maker.add(key, make(), "number")
    maker.sometimes(0.4, "period", f"{rng.choice(v.MONTHS)} {rng.randint(2018, 2027)}")
    maker.sometimes(0.4, "user", v.email(rng))
    tables = (
        (value_table(rng, maker.locale, rng.randint(3, 7), rng.randint(1, 3)),) if rng.random() < 0.75 else ()
    )
    return maker.content("dashboard", rng.choice((v.heading(rng), "Overview", "Dashboard")), *tables)


def screen(rng: Random) -> Content:
    """An application's screen of settings or details."""
    maker = Maker(rng)
    choices: tuple[tuple[str, Callable[[], str]], ...] = (
        ("user", lambda: v.name(rng).lower() + str(rng.randint(1, 99))),
        ("email", lambda: v.email(rng)),
        ("version", lambda: v.code(rng, rng.choice(("9.9.9", "9.99", "99.9.9")))),
        ("language", lambda: v.name(rng)),
        ("storage", lambda: f"{rng.randint(1, 999)} GB"),
        ("memory", lambda: f"{rng.randint(1, 512)} MB"),
        ("plan", lambda: rng.choice(("Free", "Basic", "Team", "Pro", "Business"))),
        ("time_zone", lambda: f"UTC{rng.choice('+-')}{rng.randint(0, 12)}"),
        ("renewal", maker.date),
        ("server", lambda: f"{v.name(rng).lower()}.example.net"),
        ("address", lambda: ".".join(str(rng.randint(0, 255)) for _ in range(4))),
        ("status", lambda: rng.choice(STATES)),
        ("manager", lambda: v.person(rng)),
        ("project", lambda: v.name(rng)),
        ("deadline", maker.date),
        ("serial_number", lambda: v.number_code(rng)),
        ("warranty", maker.date),
    )
    for key, make in rng.sample(choices, rng.randint(4, 10)):
        maker.add(key, make())
    tables = (
        (value_table(rng, maker.locale, rng.randint(2, 6), rng.randint(1, 3)),) if rng.random() < 0.4 else ()
    )
    notes = (v.sentence(rng),) if rng.random() < 0.4 else ()
    return maker.content(
        "screen", rng.choice((v.heading(rng), "Settings", "Account", "Details")), *tables, paragraphs=notes
    )


def statement(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("holder", v.person(rng))
    maker.add(
        "account_number", v.code(rng, rng.choice(("9999999999", "AA99 9999 9999 9999", "99-9999-99"))), "code"
    )
    maker.sometimes(0.7, "period", f"{rng.choice(v.MONTHS)} {rng.randint(2018, 2027)}")
    maker.add("opening_balance", maker.amount(), "amount")
    maker.add("closing_balance", maker.amount(), "amount")
    rows = {}
    for _ in range(rng.randint(3, 12)):
        cents = rng.choice((-1, -1, 1)) * rng.randint(100, rng.choice((9_999, 300_000)))
        rows[v.company(rng)] = (maker.date(), maker.locale.number(cents))
    columns = (rng.choice(("Description", "Details", "Payee")), "Date", rng.choice(("Amount", "Booked")))
    table = Table(columns, tuple((label, *cells) for label, cells in rows.items()), "payment")
    return maker.content(
        "statement", rng.choice(("Account statement", "Bank statement", v.company(rng))), table
    )


def letter(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("sender", v.company(rng))
    maker.add("recipient", v.person(rng))
    maker.add("date", maker.date(), "date")
    maker.sometimes(0.6, "reference", v.number_code(rng), "code")
    maker.sometimes(0.3, "phone", v.phone(rng), "code")
    paragraphs = tuple(
        " ".join(v.sentence(rng) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 4))
    )
    return maker.content("letter", v.heading(rng), paragraphs=paragraphs)


def ticket(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("passenger", v.person(rng))
    maker.add("origin", v.name(rng))
    maker.add("destination", v.name(rng))
    maker.add("date", maker.date(), "date")
    maker.add("departs", v.clock(rng))
    maker.sometimes(0.6, "arrives", v.clock(rng))
    maker.sometimes(0.8, "seat", v.code(rng, rng.choice(("99A", "9A", "99"))), "code")
    maker.sometimes(0.6, "gate", v.code(rng, rng.choice(("A9", "99", "9"))), "code")
    maker.sometimes(0.5, "carriage", rng.choice(("1", "2", "Economy", "Business", "First")))
    maker.sometimes(0.8, "booking", v.code(rng, rng.choice(("AAAAAA", "A9A9A9", "999999"))), "code")
    maker.sometimes(0.3, "total", maker.amount(), "amount")
    note = (v.sentence(rng),) if rng.random() < 0.4 else ()
    return maker.content(
        "ticket", rng.choice(("Boarding pass", "Ticket", "Train ticket", v.company(rng))), paragraphs=note
    )


def parcel(rng: Random) -> Content:
    """A shipping label."""
    maker = Maker(rng)
    maker.add(
        "tracking_number",
        v.code(rng, rng.choice(("AA999999999AA", "9999 9999 9999", "A999-9999-99"))),
        "code",
    )
    maker.add("recipient", v.person(rng))
    maker.add("sender", v.company(rng))
    maker.sometimes(0.8, "street", v.street(rng))
    maker.sometimes(0.8, "city", v.city(rng))
    maker.sometimes(0.7, "weight", f"{rng.randint(0, 40)}.{rng.randint(0, 9)} kg")
    maker.sometimes(0.6, "service", rng.choice(("Express", "Standard", "Priority", "Economy", "Overnight")))
    maker.sometimes(0.4, "reference", v.number_code(rng), "code")
    maker.sometimes(0.3, "quantity", str(rng.randint(1, 12)), "number")
    maker.sometimes(0.3, "date", maker.date(), "date")
    return maker.content("parcel", rng.choice((v.company(rng), "Parcel", v.name(rng).upper() + " EXPRESS")))


def payslip(rng: Random) -> Content:
    maker = Maker(rng)
    maker.add("employee", v.person(rng))
    maker.add("employer", v.company(rng))
    maker.sometimes(0.7, "employee_number", v.number_code(rng), "code")
    maker.add("period", f"{rng.choice(v.MONTHS)} {rng.randint(2018, 2027)}")
    maker.sometimes(0.5, "department", v.name(rng))
    maker.add("gross_pay", maker.amount(), "amount")
    maker.sometimes(0.6, "tax", maker.amount(), "amount")
    maker.add("net_pay", maker.amount(), "amount")
    maker.sometimes(0.4, "iban", v.code(rng, "AA99 9999 9999 9999 9999"), "code")
    return maker.content("payslip", rng.choice(("Payslip", "Pay slip", "Salary statement")))


def chart(rng: Random) -> Content:
    """A bar chart whose values are printed or stand on the axis' lines."""
    locale = v.locale(rng)
    names: dict[str, str] = {}
    wanted = rng.randint(3, 9)
    style = rng.choice(("name", "month", "year", "quarter", "code"))
    start = rng.randint(1990, 2018)
    pools: dict[str, Callable[[int], str]] = {
        "name": lambda i: v.name(rng),
        "month": lambda i: v.MONTHS[(start + i) % 12][:3],
        "year": lambda i: str(start + i),
        "quarter": lambda i: f"Q{i % 4 + 1} {start % 100 + i // 4:02d}",
        "code": lambda i: v.code(rng, "A9"),
    }
    step, unit = rng.choice((1, 1, 2, 5, 10, 50, 100)), rng.choice(("", "", "", "%", "k"))
    index = 0
    while len(names) < wanted:
        names.setdefault(pools[style](index), f"{locale.count(step * rng.randint(1, 60))}{unit}")
        index += 1
    axis = rng.choice(
        ("Sales", "Visitors", "Output", "Cost", "Energy", "Members", "Points", "Count", "Rainfall")
    )
    series = (Series(axis, tuple(names.items())),)
    return Content("chart", v.heading(rng), series=series)


KINDS: dict[str, Callable[[Random], Content]] = {
    "invoice": invoice,
    "receipt": receipt,
    "form": form,
    "table": report,
    "article": article,
    "dashboard": dashboard,
    "screen": screen,
    "statement": statement,
    "letter": letter,
    "ticket": ticket,
    "parcel": parcel,
    "payslip": payslip,
    "chart": chart,
}
