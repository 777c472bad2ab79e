"""The tables of docs/deployment.md are those of the code. `python -m tests.deploy.test_page` prints them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fovea.core.settings import settings_of
from fovea.deploy.front import EXACT, FOLDERS
from fovea.deploy.machine import SERVICES
from fovea.deploy.monitoring.objectives import Targets
from fovea.deploy.read import SECTIONS
from fovea.deploy.spec import DeploySpec, Pool
from fovea.deploy.target import TARGETS

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
CLASSES: dict[str, Any] = {"top": DeploySpec, "[[pool]]": Pool, **{f"[{k}]": v for k, v in SECTIONS.items()}}
CLASSES["[monitoring.targets]"] = Targets


def table(cls: type) -> str:
    """Return the rows of a table of the spec: key, default, accepted values, help."""
    rows = []
    for entry in settings_of(cls, nested=False):
        default = "empty" if entry.default in ("", ()) else str(entry.default)
        default = default.lower() if isinstance(entry.default, bool) else default
        accepted = re.sub("^, ", "empty, ", entry.rule.accepted) or (
            "true or false" if isinstance(entry.default, bool) else ""
        )
        rows.append(f"| `{entry.name}` | {default} | {accepted} | {entry.rule.help} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", CLASSES)
def test_a_table_of_the_page_is_what_the_code_says(name: str) -> None:
    assert table(CLASSES[name]) in PAGE


def test_the_page_names_all_targets() -> None:
    assert [each.name for each in TARGETS if f"`{each.name}`" not in PAGE] == []


def test_the_page_names_the_public_paths_and_the_services() -> None:
    for word in (*EXACT, *(f"{each}/" for each in FOLDERS), *SERVICES):
        assert f"`{word}`" in PAGE


def test_every_example_of_a_spec_can_be_read() -> None:
    import tomllib

    from fovea.cli.deploy import known_settings
    from fovea.deploy.read import spec_of

    found = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert found
    for text in found:
        spec_of(tomllib.loads(text), known_settings())


if __name__ == "__main__":
    for title, each in CLASSES.items():
        print(f"{title}\n{table(each)}\n")
