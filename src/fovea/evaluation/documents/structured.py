"""Questions whose answer is JSON of a given schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from fovea.evaluation.documents.evidence import evidence
from fovea.evaluation.documents.fields import absent_key, name_of, shown_fields
from fovea.evaluation.documents.page import Page
from fovea.evaluation.scenes.sample import Turn


def structured(rng: Random, page: Page) -> Turn | None:
    """Several fields as JSON of a schema; a field that is not on the page is null. Or the row of a table."""
    shown = shown_fields(page)
    if rows := _whole_rows(page) if not shown or rng.random() < 0.35 else []:
        return _row_as_json(rng, page, *rng.choice(rows))
    if not shown:
        return None
    some = rng.sample(shown, rng.randint(1, min(6, len(shown))))
    if rng.random() < 0.3:
        some = sorted(some, key=shown.index)
    entries: list[tuple[str, str | None]] = [(one.key, one.value) for one in some]
    missing = absent_key(rng, page) if rng.random() < 0.35 else None
    if missing is not None:
        entries.insert(rng.randint(0, len(entries)), (missing, None))
    style = rng.choice((str, str, str, camel))
    value = {style(key): text for key, text in entries}
    listed = ", ".join(name_of(key) for key, _ in entries)
    form = rng.choice(
        (
            f"Give the {listed} as JSON.",
            f"JSON with {listed}.",
            "Fill in the JSON.",
            "Extract the data as JSON.",
            listed,
        )
    )
    answer = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    focus = (box for one in some for box in evidence(page, (f"field:{one.key}",), (one.label,)))
    return Turn(form, answer, (answer,), tuple(focus), schema=schema_of(list(value)))


def _whole_rows(page: Page) -> list[tuple[int, int]]:
    return [
        (t, r)
        for t, table in enumerate(page.content.tables)
        for r in range(len(table.rows))
        if all(f"cell:{t}:{r}:{c}" in page.places for c in range(len(table.columns)))
    ]


def _row_as_json(rng: Random, page: Page, t: int, r: int) -> Turn:
    """One row of a table as JSON, with the names of its columns as keys."""
    table = page.content.tables[t]
    keys = (re.sub(r"\W+", "_", name.lower()).strip("_") for name in table.columns)
    value = dict(zip(keys, table.rows[r], strict=True))
    form = rng.choice(('Give the row "{}" as JSON.', 'The {1} "{0}" as JSON.', 'Extract "{}".'))
    answer = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    focus = evidence(page, [f"cell:{t}:{r}:{c}" for c in range(len(table.columns))], table.columns)
    question = form.format(table.rows[r][0], table.noun)
    return Turn(question, answer, (answer,), focus, schema=schema_of(list(value)))


def schema_of(keys: Sequence[str]) -> dict[str, Any]:
    """A JSON Schema of an object with these keys, each a text or null."""
    return {
        "type": "object",
        "properties": {key: {"type": ["string", "null"]} for key in keys},
        "required": list(keys),
        "additionalProperties": False,
    }


def camel(key: str) -> str:
    """A key in camel case: "invoice_number" is "invoiceNumber"."""
    first, *rest = key.split("_")
    return first + "".join(part.capitalize() for part in rest)
