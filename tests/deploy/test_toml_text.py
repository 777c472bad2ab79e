import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.deploy.formats import toml_text
from tests.support.thorough import examples

TEXTS = st.text()
SCALARS = TEXTS | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False)
KEYS = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
VALUES = st.dictionaries(KEYS, SCALARS | st.lists(TEXTS))


@settings(max_examples=examples(36))
@given(VALUES, st.lists(VALUES), st.sampled_from(["", "one\n\ntwo"]))
def test_written_values_are_read_again(
    values: dict[str, Any], tables: list[dict[str, Any]], comment: str
) -> None:
    values = {name: value for name, value in values.items() if name != "backend"}
    text = toml_text(values, [("backend", table) for table in tables], comment=comment)
    read = tomllib.loads(text)
    assert read.pop("backend", []) == tables
    assert read == values


def test_a_value_without_a_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="no form"):
        toml_text({"x": None})
