"""Questions for labelled values: what a field says, and fields that a page does not have."""

from __future__ import annotations

from random import Random

from fovea.evaluation.documents.content import Field
from fovea.evaluation.documents.evidence import turn
from fovea.evaluation.documents.labels import LABELS
from fovea.evaluation.documents.page import Page
from fovea.evaluation.scenes.sample import Turn

ABSENT = "Not on this page."
"""The answer to a question for something that the page does not show."""
NAMED: tuple[str, ...] = (
    "What is the {}?", "What is the {}?", "Read the {}.", "Give the {}.", "{}?", "Which {} is given?",
)  # fmt: skip
"""Questions for a field by its meaning."""
ALIKE: tuple[tuple[str, ...], ...] = (
    ("date", "invoice_date", "published", "signed_on", "period", "deadline", "due_date", "renewal",
     "warranty"),
    ("customer", "recipient", "name", "passenger", "holder", "employee", "patient", "user", "author",
     "manager"),
    ("seller", "sender", "store", "employer", "origin"),
    ("account_number", "iban", "customer_number", "holder", "user"),
    ("order_number", "orders", "reference", "booking", "receipt_number", "invoice_number",
     "article_number", "batch", "quantity", "serial_number", "tracking_number", "member_number",
     "employee_number"),
    ("carriage", "seat", "gate", "service", "plan", "till", "section", "department", "destination",
     "room"),
    ("total", "subtotal", "closing_balance", "opening_balance", "net_pay", "gross_pay", "cash",
     "paid_by", "change"),
    ("street", "city", "address", "server", "nationality", "birth_place", "origin", "destination"),
    ("time", "departs", "arrives", "time_zone"),
    ("revenue", "budget", "refunds"),
    ("status", "version", "language", "subject", "project"),
    ("memory", "storage"),
    ("phone", "email"),
    ("users", "visitors", "user"),
)  # fmt: skip
"""Keys that a reader could take for one another. None is asked for as absent where another one is shown."""


def name_of(key: str) -> str:
    """A key in words: "invoice_number" is "invoice number"."""
    return key.replace("_", " ").replace("vat id", "VAT ID").replace("iban", "IBAN")


def field(rng: Random, page: Page) -> Turn | None:
    """The value of a field, asked for by its meaning or by its label."""
    shown = shown_fields(page)
    if not shown:
        return None
    one = rng.choice(shown)
    if rng.random() < 0.65:
        name = name_of(one.key)
        forms = NAMED
    else:
        name = one.label
        forms = ('What is written at "{}"?', 'What is the value of "{}"?', 'Read the field "{}".')
    return turn(rng.choice(forms).format(name), one.value, page, f"field:{one.key}", labels=(one.label,))


def absent_key(rng: Random, page: Page) -> str | None:
    """The key of a field that the page does not have, and that no field of the page could be taken for."""
    present = {one.key for one in page.content.fields}
    printed = {one.label.lower() for one in page.content.fields}
    blocked = {key for group in ALIKE if present & set(group) for key in group}
    keys = [
        key
        for key, labels in LABELS.items()
        if key not in present and key not in blocked and not printed & {label.lower() for label in labels}
    ]
    return rng.choice(keys) if keys and page.words else None


def absent(rng: Random, page: Page) -> Turn | None:
    """A question for a field that the page does not have."""
    key = absent_key(rng, page)
    if key is None:
        return None
    return Turn(rng.choice(NAMED).format(name_of(key)), ABSENT, (ABSENT, "Not on this page", "null"))


def shown_fields(page: Page) -> list[Field]:
    """The fields whose values stand on the page."""
    return [one for one in page.content.fields if f"field:{one.key}" in page.places]
