"""Makes the fields and tables of documents."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from fovea.evaluation.documents import vocabulary as v
from fovea.evaluation.documents.content import Content, Field, Sort, Table
from fovea.evaluation.documents.labels import LABELS

STATES = v.listed(
    "active inactive open closed pending paid shipped draft new done failed running ready blocked"
)
COLUMNS = v.listed(
    "Year|Count|Share|Start|End|Code|State|Owner|Price|Rate|Score|Rank|Height|Width|Depth|Speed|Load|Level|"
    "Stock|Sold|Left|Opened|Zone|Shift|Team|Grade|Size|Age|Cost|Gain",
    "|",
)


class Maker:
    """Makes fields and tables in one document's way to write money, dates and labels."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.locale = rng, v.locale(rng)
        self.fields: dict[str, Field] = {}
        self.labels: set[str] = set()

    def add(self, key: str, value: str, sort: Sort = "text") -> None:
        """Add a field, under a label that no other field of the document has."""
        free = [label for label in LABELS[key] if label not in self.labels]
        if free and key not in self.fields:
            label = self.rng.choice(free)
            self.labels.add(label)
            self.fields[key] = Field(key, label, value, sort)

    def sometimes(self, chance: float, key: str, value: str, sort: Sort = "text") -> None:
        if self.rng.random() < chance:
            self.add(key, value, sort)

    def date(self) -> str:
        return self.locale.date(v.day(self.rng))

    def amount(self, high: int = 900_000) -> str:
        return self.locale.amount(self.rng.randint(50, self.rng.choice((2_000, 20_000, high))))

    def content(self, kind: str, title: str, *tables: Table, paragraphs: tuple[str, ...] = ()) -> Content:
        fields = list(self.fields.values())
        return Content(kind, title, tuple(fields), tables, paragraphs)


def items(maker: Maker, low: int, high: int, form: str) -> tuple[Table, int]:
    """A table of things that were sold, and their sum in cents. form: "full", "short" or "priced"."""
    rng, locale = maker.rng, maker.locale
    rows: list[tuple[str, ...]] = []
    seen: set[str] = set()
    total = 0
    for _ in range(rng.randint(low, high)):
        thing = v.product(rng)
        if thing.lower() in seen:
            continue
        seen.add(thing.lower())
        count, price = (
            rng.choice((1, 1, 2, 3, 4, 5, 6, 8, 10, 12, 25)),
            rng.randint(50, rng.choice((999, 9_999, 60_000))),
        )
        total += count * price
        amount = locale.number(count * price)
        if form == "full":
            rows.append((thing, str(count), locale.number(price), amount))
        elif form == "priced":
            rows.append((thing, str(count), amount))
        else:
            rows.append((thing, amount))
    first = rng.choice(("Item", "Description", "Product", "Article"))
    quantity, price_name = (
        rng.choice(("Qty", "Quantity", "Pcs", "Units")),
        rng.choice(("Price", "Unit price", "Rate")),
    )
    amount_name = rng.choice(("Amount", "Line total", "Sum", "Value"))
    columns = {
        "full": (first, quantity, price_name, amount_name),
        "priced": (first, quantity, amount_name),
        "short": (first, amount_name),
    }[form]
    return Table(columns, tuple(rows), "item"), total


def sums(maker: Maker, net: int) -> None:
    """Subtotal, tax and total of an invoice or a receipt."""
    rng, locale = maker.rng, maker.locale
    rate = rng.choice((0, 5, 7, 8, 10, 19, 20, 21))
    if rng.random() < 0.25:
        cost = rng.randint(300, 4_000)
        maker.add("shipping", locale.amount(cost), "amount")
        net += cost
    if rng.random() < 0.2:
        less = rng.randint(100, max(101, net // 5))
        maker.add("discount", locale.amount(-less), "amount")
        net -= less
    if rate:
        maker.add("subtotal", locale.amount(net), "amount")
        maker.add("tax", locale.amount(round(net * rate / 100)), "amount")
    maker.add("total", locale.amount(net + round(net * rate / 100)), "amount")


def value_table(rng: Random, locale: v.Locale, rows: int, columns: int) -> Table:
    """A table of numbers, codes or words by row and column."""
    makers: tuple[Callable[[], str], ...] = (
        lambda: str(rng.randint(0, rng.choice((20, 200, 5_000)))),
        lambda: locale.number(rng.randint(10, 900_000)),
        lambda: f"{rng.randint(0, 99)}{locale.decimal}{rng.randint(0, 9)} %",
        lambda: v.clock(rng),
        lambda: locale.date(v.day(rng)),
        lambda: v.code(rng, rng.choice(("A9", "99-A", "AA99", "999"))),
        lambda: rng.choice(STATES),
        lambda: v.name(rng),
    )
    first = rng.choice(("Name", "Place", "Station", "Region", "Product", "Person", "Project", "City"))
    kinds = [rng.choice(makers) for _ in range(columns)]
    labels: dict[str, str] = {}
    while len(labels) < rows:
        label = v.product(rng) if first == "Product" else v.name(rng)
        labels.setdefault(label.lower(), label)
    table = tuple((label, *(make() for make in kinds)) for label in labels.values())
    return Table((first, *rng.sample(COLUMNS, columns)), table, first.lower())
