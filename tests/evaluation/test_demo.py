"""examples/demo.py: the verdicts on the fields of the invoice, and the message without fovea-page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from fovea.core import bundled

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    import demo

    return demo


def test_fields_are_judged_one_by_one(demo: ModuleType) -> None:
    lines = demo.checked(
        '{"total": "1.00", "date": "today"}', {"total": "1.00", "date": "now", "name": "Ada"}
    )
    assert [line.split(maxsplit=2) for line in lines] == [
        ["total", "1.00", "right"],
        ["date", "now", "wrong: 'today'"],
        ["name", "Ada", "wrong: None"],
        ["1", "of", "3 fields are right."],
    ]
    assert demo.checked('{"total": "1', {"total": "1.00"})[-1] == "0 of 1 fields are right."


def test_the_invoice_has_a_schema_for_its_values() -> None:
    schema = json.loads((EXAMPLES / "invoice.schema.json").read_text())
    values = json.loads((EXAMPLES / "invoice.values.json").read_text())
    assert schema["required"] == list(schema["properties"]) == list(values)
    with Image.open(EXAMPLES / "invoice.png") as image:
        assert min(image.size) > 500


def test_without_fovea_page_the_demo_says_how_to_install_it(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    demo.read_invoice()
    assert (
        "fovea-page is not installed; install it with: pip install 'fovea[page]'" in capsys.readouterr().out
    )
