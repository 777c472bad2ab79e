"""All errors of a file at once: their places, lines and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from fovea.core.config_files import MOST_NAMES, check_keys, read_toml
from fovea.core.errors import ConfigError
from fovea.core.findings import Findings, joined
from fovea.core.toml_lines import toml_lines

TEXT = '''
name = "a"                      # 2
"quoted key".inner = 1
text = """
name = "not a key"
[nor a table]
"""
[[pool]]                        # 8
name = "first"
[pool.settings]
max_queue = 1
[[pool]]  # 12: the second
settings = { max_queue = 2 }
[[pool.role]]
name = "x"
[experiment.guard]
error_rate = [
  1,
]
'''


def test_lines_of_keys_and_tables() -> None:
    lines = toml_lines(TEXT)
    assert {place: lines[place] for place in lines if place[-1] != 1} == {
        ("name",): 2, ("quoted key",): 3, ("quoted key", "inner"): 3, ("text",): 4,
        ("pool", 1, "name"): 9, ("pool", 1, "settings"): 10, ("pool", 1, "settings", "max_queue"): 11,
        ("pool", 2): 12, ("pool", 2, "settings"): 13, ("pool", 2, "role", 1, "name"): 15,
        ("experiment", "guard"): 16, ("experiment", "guard", "error_rate"): 17,
    }  # fmt: skip
    assert (lines["pool", 1], lines["pool", 2, "role", 1]) == (8, 14)


def test_quotes_in_a_comment_begin_no_text() -> None:
    assert toml_lines('# """ is not a text\nname = 1\n') == {("name",): 2}


def test_an_error_names_the_nearest_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(TEXT)
    file = read_toml(path)
    assert file.place("pool", 2, "settings", "max_queue") == f"{path}:13"
    assert file.place("pool", 3) == file.place("none") == str(path)
    with pytest.raises(ConfigError) as caught, file.errors():
        raise ConfigError("wrong", param="name", at=("pool", 1))
    assert caught.value.message == f"{path}:9: wrong"


def test_findings_of_nested_parts() -> None:
    inner, outer = Findings(), Findings()
    with inner.part("role", 2):
        raise ConfigError("one", param="a")
    with inner.part():
        raise ConfigError("two")
    with outer.part("pool", 1):
        inner.check()
    with outer.part():
        raise ConfigError("three")
    with pytest.raises(ConfigError) as caught:
        outer.check()
    assert [(each.at, each.message) for each in caught.value.findings] == [
        (("pool", 1, "role", 2), "one"), (("pool", 1), "two"), ((), "three"),
    ]  # fmt: skip
    assert caught.value.message == "one; two; three"
    assert caught.value.param == "a"


def test_one_error_stays_what_it_is_and_none_is_said_twice() -> None:
    error = ConfigError("one")
    assert joined([error]) is error
    assert joined([error, ConfigError("one")]) is not None
    assert len(joined([error, ConfigError("one"), ConfigError("two")]).findings) == 2
    Findings().check()


def test_of_many_unknown_keys_some_are_named_and_the_others_counted() -> None:
    """A body of a request may have a million of them."""
    keys = {f"{'k' * 1000}{number}": 1 for number in range(MOST_NAMES + 5)}
    with pytest.raises(ConfigError) as caught:
        check_keys("", keys, ["name"])
    *named, others = [each.message for each in caught.value.findings]
    assert named == [f"unknown key {'k' * 100!r}; accepted: name"]
    assert others == "and 5 more unknown names"
