"""Tables of the file: every wrong field is an error that says where it is and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.gateway.config import BackendConfig, ModelConfig, api_key, read_tables

GOOD = {
    "backend": {"url": "http://a:1"},
    "model": {"name": "m"},
    "discover": {"from": "dns:engines:8000"},
}


def refusal(table: str, entry: Any) -> ConfigError:
    """The error of an entry that follows a good one."""
    with pytest.raises(ConfigError) as caught:
        read_tables({table: [GOOD[table], entry]})
    return caught.value


@pytest.mark.parametrize(
    ("table", "fields", "param", "accepted"),
    [
        ("backend", {}, "url", "missing"),
        ("backend", {"url": ""}, "url", "http://HOST:PORT"),
        ("backend", {"url": 5}, "url", "a text"),
        ("backend", {"url": "a:8000"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "ftp://a"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://[::1"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a:99999"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a:0"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a:port"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a b:80"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a/?x=1"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://a/#x"}, "url", "http://HOST:PORT"),
        ("backend", {"url": "http://user:secret@a"}, "url", "api_key_file"),
        ("backend", {"url": "http://user:secret@a:99999"}, "url", "api_key_file"),
        ("backend", {"url": "http://b", "name": 5}, "name", "a text"),
        ("backend", {"url": "http://b", "models": "m"}, "models", "a list of texts"),
        ("backend", {"url": "http://b", "models": [5]}, "models", "a list of texts"),
        ("backend", {"url": "http://b", "weight": 0}, "weight", "0.001 to 1000"),
        ("backend", {"url": "http://b", "weight": -1.0}, "weight", "0.001 to 1000"),
        ("backend", {"url": "http://b", "weight": float("nan")}, "weight", "0.001 to 1000"),
        ("backend", {"url": "http://b", "weight": float("inf")}, "weight", "0.001 to 1000"),
        ("backend", {"url": "http://b", "weight": "1"}, "weight", "a number"),
        ("backend", {"url": "http://b", "weight": True}, "weight", "a number"),
        ("backend", {"url": "http://b", "priority": 1.5}, "priority", "a whole number"),
        ("backend", {"url": "http://b", "priority": -1}, "priority", "0 and more"),
        ("backend", {"url": "http://b", "max_requests": False}, "max_requests", "a whole number"),
        ("backend", {"url": "http://b", "max_tokens": -5}, "max_tokens", "0 and more"),
        ("backend", {"url": "http://b", "apis": ["chat", "images"]}, "apis", "chat, completions, messages"),
        ("backend", {"url": "http://b", "degrade": "size"}, "degrade", "detail, max-pixels, off"),
        ("backend", {"url": "http://b", "health": "health"}, "health", "a path"),
        ("backend", {"url": "http://b", "api_key_file": ["x"]}, "api_key_file", "a text"),
        ("backend", {"url": "http://b", "wieght": 2}, "wieght", "did you mean 'weight'"),
        ("backend", {"url": "http://b", "zzz": 2}, "zzz", "accepted: url, name"),
        ("model", {}, "name", "missing"),
        ("model", {"name": ""}, "name", "one character and more"),
        ("model", {"name": "x", "aliases": [""]}, "name", "one character and more"),
        ("model", {"name": "x", "aliases": "y"}, "aliases", "a list of texts"),
        ("model", {"name": "x", "fallback": [None]}, "fallback", "a list of texts"),
        ("model", {"name": "x", "policy": "fastest"}, "policy", "cache-affine, least-busy"),
        ("model", {"name": "x", "policy": 5}, "policy", "a text"),
        ("model", {"name": "x", "served": {}}, "served", "a text"),
        ("model", {"name": "x", "fallbacks": []}, "fallbacks", "did you mean 'fallback'"),
        ("discover", {}, "from", "dns:HOST:PORT, file:PATH"),
        ("discover", {"from": "consul:x"}, "from", "dns:HOST:PORT, file:PATH"),
        ("discover", {"from": "dns:x:1", "wieght": 2}, "wieght", "did you mean 'weight'"),
        ("discover", {"from": "dns:x:1", "weight": 0}, "weight", "0.001 to 1000"),
        ("discover", {"from": "dns:x:1", "name": "one"}, "name", "each backend has its own"),
        ("discover", {"from": "dns:x:1", "url": "http://a"}, "url", "each backend has its own"),
    ],
)
def test_a_wrong_field(table: str, fields: dict[str, Any], param: str, accepted: str) -> None:
    error = refusal(table, fields)
    assert error.message.startswith(f"[[{table}]] number 2: ")
    assert param in error.message
    assert accepted in error.message
    assert error.param == param
    assert "secret" not in error.message


@pytest.mark.parametrize("table", ["backend", "discover", "model", "experiment"])
@pytest.mark.parametrize("value", [{}, "x", 5, ["x"], [{}, 5], None])
def test_a_table_that_is_no_list_of_tables(table: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{table} is not an array of tables; accepted: \[\[{table}\]\]"
    ) as caught:
        read_tables({table: value})
    assert caught.value.param == table


NAMES = [
    "url",
    "name",
    "models",
    "weight",
    "priority",
    "apis",
    "health",
    "aliases",
    "policy",
    "from",
    "other",
]
WRONG = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text() | st.integers())
)


@given(
    st.sampled_from(["backend", "model", "discover"]),
    st.dictionaries(st.sampled_from(NAMES), WRONG | st.dictionaries(st.text(), WRONG)),
)
def test_any_entry_is_read_or_refused_with_its_place(table: str, entry: dict[str, Any]) -> None:
    refused: ConfigError | None = None
    try:
        read_tables({table: [entry]})
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert refused.message.startswith(f"[[{table}]] number 1: ")
        assert refused.param in {*entry, "url", "name", "from"}


def test_two_backends_or_models_with_one_name() -> None:
    with pytest.raises(ConfigError, match=r"\[\[backend\]\]: the name 'a:1' is given twice"):
        read_tables({"backend": [{"url": "http://a:1"}, {"url": "http://b", "name": "a:1"}]})
    with pytest.raises(ConfigError, match=r"\[\[model\]\]: the name 'x' is given twice"):
        read_tables({"model": [{"name": "m", "aliases": ["x"]}, {"name": "x"}]})


def test_a_fallback_is_a_model_of_the_file() -> None:
    with pytest.raises(
        ConfigError, match=r"\[\[model\]\] 'm': fallback names 'x'; accepted: .*: m, n"
    ) as caught:
        read_tables({"model": [{"name": "m", "fallback": ["x"]}, {"name": "n"}]})
    assert caught.value.param == "fallback"
    tables = read_tables(
        {"model": [{"name": "m", "fallback": ["alias"]}, {"name": "n", "aliases": ["alias"]}]}
    )
    assert tables.models[0].fallback == ("alias",)


@pytest.mark.parametrize(
    ("url", "clean", "name"),
    [
        ("http://a:8000", "http://a:8000", "a:8000"),
        ("http://a:8000/", "http://a:8000", "a:8000"),
        ("http://a:8000/v1", "http://a:8000", "a:8000"),
        ("http://a:8000/v1/", "http://a:8000", "a:8000"),
        ("https://a/prefix/v1", "https://a/prefix", "a"),
        ("http://[::1]:80", "http://[::1]:80", "[::1]:80"),
    ],
)
def test_addresses(url: str, clean: str, name: str) -> None:
    backend = BackendConfig(url)
    assert (backend.url, backend.name) == (clean, name)


def test_all_fields_of_a_good_file() -> None:
    tables = read_tables(
        {
            "backend": [{"url": "http://a:1", "weight": 2, "models": ["m"], "apis": ["chat", "messages"]}],
            "discover": [{"from": "kubernetes:ns/svc:80", "weight": 3}],
            "model": [{"name": "m", "aliases": ["x"], "policy": "priority"}],
            "experiment": [{"name": "e"}],
            "port": 8080,
        }
    )
    assert tables.backends == (BackendConfig("http://a:1", "a:1", ("m",), 2.0, apis=("chat", "messages")),)
    assert isinstance(tables.backends[0].weight, float)
    assert tables.models == (ModelConfig("m", ("x",), policy="priority"),)
    assert (tables.discover[0].source, dict(tables.discover[0].backend)) == (
        "kubernetes:ns/svc:80",
        {"weight": 3},
    )
    assert tables.experiments == ({"name": "e"},)
    assert read_tables({}).backends == ()


def test_keys_of_backends(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\nsecret \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    [relative] = read_tables({"backend": [{"url": "http://a", "api_key_file": "key"}]}, tmp_path).backends
    assert api_key(relative) == "secret"
    assert api_key(BackendConfig("http://a")) == ""
    for name, reason in (("none", "No such file"), ("binary", "it is not text"), (".", "directory")):
        with pytest.raises(ConfigError, match=f"backend 'a': .* cannot be read: .*{reason}") as caught:
            api_key(BackendConfig("http://a", api_key_file=str(tmp_path / name)))
        assert caught.value.param == "api_key_file"
