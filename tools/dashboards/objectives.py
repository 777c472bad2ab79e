"""The list of objectives in docs/monitoring.md."""

from __future__ import annotations

from fovea.deploy.monitoring.objectives import Targets

START, END = "<!-- objectives -->\n", "<!-- end -->"


def fill_objectives(page: str) -> str:
    """Return a page with the list of objectives as it has to be now, between two marks."""
    before, _, rest = page.partition(START)
    lines = "".join(f"- `{each.slo}`: {each.text}\n" for each in Targets().objectives())
    return f"{before}{START}\n{lines}\n{END}{rest.partition(END)[2]}"
