"""The tables of docs/cluster.md are those of the code; `python -m tests.cluster.test_page` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.cluster.ray.spec import Ingress, Model, Role
from fovea.cluster.scaling import ScaleSettings
from tests.deploy.test_page import table

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
CLASSES = {"ingress": Ingress, "model": Model, "model.role": Role, "scale": ScaleSettings}
HEAD = "| key | default | accepted | meaning |\n|---|---|---|---|\n"


@pytest.mark.parametrize("name", CLASSES)
def test_a_table_of_the_page_is_what_the_code_says(name: str) -> None:
    assert HEAD + table(CLASSES[name]) in PAGE.read_text("utf-8")


def main() -> None:
    text = PAGE.read_text("utf-8")
    for cls in CLASSES.values():
        rows = table(cls)
        first = rows.partition(" | ")[0]
        start = text.index(first)
        text = text[:start] + rows + text[text.index("\n\n", start) :]
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
