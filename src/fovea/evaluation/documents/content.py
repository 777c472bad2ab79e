"""The facts of a document before it is laid out: title, fields, tables, lines of text, series of a chart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Sort = Literal["text", "date", "amount", "number", "code"]
"""What a field's value is: it decides which questions are asked about it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One labelled value.

    key: its meaning, in snake case, equal in all documents: "invoice_number".
    label: the label as it is printed: "Invoice No."
    value: the value as it is printed.
    """

    key: str
    label: str
    value: str
    sort: Sort = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """A table, as printed.

    columns: the headers, one per column.
    rows: the cells; each row has as many as there are columns. The first cell names the row.
    noun: what a row is, for questions: "item".
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    noun: str = "row"


@dataclass(frozen=True, slots=True)
class Series:
    """The bars, points or slices of a chart.

    axis: what the values measure, as printed.
    values: the name of each bar and its value, as printed.
    """

    axis: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Content:
    """All facts of one document.

    kind: kind of the document, such as "invoice".
    title: the heading, as printed.
    fields: labelled values; each key at most once.
    tables: tables in the order of the page.
    paragraphs: running text.
    series: of a chart.
    """

    kind: str
    title: str
    fields: tuple[Field, ...] = ()
    tables: tuple[Table, ...] = ()
    paragraphs: tuple[str, ...] = ()
    series: tuple[Series, ...] = field(default=())

    def field(self, key: str) -> Field | None:
        """The field with that key; None if the document has none."""
        return next((one for one in self.fields if one.key == key), None)
