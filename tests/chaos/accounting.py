"""Compares what clients received with what the gateway recorded. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.checker import Violation

COUNTS = ("prompt_tokens", "visual_tokens", "cached_tokens", "completion_tokens")
KILLED_S = 2.0
"""Seconds before a worker is killed whose records may be lost: documented is one, and clocks differ."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """An answer that a client has received completely.

    at_s: its end in seconds of the epoch. usage: as the answer states it; None: it states none. An answer
    from the response cache states, and is recorded with, the tokens of the answer that was stored.
    """

    marker: str
    at_s: float
    usage: Mapping[str, Any] | None


def counts_of(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that an answer states, under the names of the audit log."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
    found = {"completion_tokens": usage.get("completion_tokens", usage.get("output_tokens", 0))}
    if "prompt_tokens" in usage or "input_tokens_details" in usage:
        found["prompt_tokens"] = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    else:  # Anthropic's API counts cached tokens apart
        found["prompt_tokens"] = usage.get("input_tokens", 0) + cached
    if "image_tokens" in details:
        found["visual_tokens"] = details["image_tokens"]
    return found | {"cached_tokens": cached}


def compare_receipts(
    receipts: Iterable[Receipt], audit: Sequence[Mapping[str, Any]], kills: Sequence[float]
) -> list[Violation]:
    """Check that every answer that arrived was recorded once, with exactly the tokens that it states.

    kills: when a worker of the gateway was killed, in seconds of the epoch.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for line in audit:
        if "id" in line:
            lines.setdefault(line["id"], []).append(line)
    found = []
    for receipt in receipts:
        recorded = lines.get(receipt.marker, [])
        if not recorded:
            if not any(-KILLED_S <= kill - receipt.at_s <= KILLED_S for kill in kills):
                found.append(Violation("accounting", receipt.marker, "an answer that arrived has no record"))
        elif len(recorded) > 1:
            found.append(Violation("accounting", receipt.marker, f"{len(recorded)} records of one request"))
        else:
            found += _compare(receipt, recorded[0])
    return found


def compare_parts(parts: Mapping[str, int], audit: Sequence[Mapping[str, Any]], most: int) -> list[Violation]:
    """Check that a stream that arrived in part counts at least what arrived, and at most what it may have.

    The gateway charges what the backend reports, or the estimate if nobody has seen the end.
    parts: events with text that arrived, by marker. most: most tokens of an answer.
    """
    return [
        Violation(
            "accounting", line["id"],
            f"{parts[line['id']]} tokens of the stream arrived, {line['completion_tokens']} are recorded",
        )
        for line in audit
        if line.get("id") in parts and not parts[line["id"]] <= line["completion_tokens"] <= most
    ]  # fmt: skip


def _compare(receipt: Receipt, line: Mapping[str, Any]) -> list[Violation]:
    if receipt.usage is None:
        return []
    stated = counts_of(receipt.usage)
    wrong = {name: (value, line[name]) for name, value in stated.items() if line[name] != value}
    return [Violation("accounting", receipt.marker, f"stated and recorded: {wrong}")] if wrong else []


def compare_sums(
    audit: Sequence[Mapping[str, Any]],
    rows: Iterable[Mapping[str, Any]],
    kills: Sequence[float],
    ends: Mapping[str, float],
) -> list[Violation]:
    """Check that the sums of the usage file are those of the audit log.

    rows: sums of the usage file, by any key. ends: end of each request in seconds of the epoch.
    What ended shortly before a kill may be missing in the sums.
    """
    sums, most, least = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        sums.update({name: int(row[name]) for name in ("requests", *COUNTS)})
    for line in audit:
        if "id" not in line or not line["model_asked"]:
            continue
        values = {"requests": 1} | {name: line[name] for name in COUNTS}
        most.update(values)
        at = ends.get(line["id"], 0.0)
        unserved = line["status"] >= 400 and not line["backend"]  # refused before its model was chosen, maybe
        if not unserved and not any(-KILLED_S <= kill - at <= KILLED_S for kill in kills):
            least.update(values)
    return [
        Violation(
            "accounting", "sums", f"{name}: {sums[name]} in usage, {least[name]} to {most[name]} audited"
        )
        for name in ("requests", *COUNTS)
        if not least[name] <= sums[name] <= most[name]
    ]
