"""Backends and models come and go without losing the state of those that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fovea.core.errors import ConfigError, NotFound
from fovea.gateway.backends.backend import LEAST_SHARE, Load
from fovea.gateway.backends.fleet import Drains, Fleet
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.settings import ResilienceSettings
from tests.gateway.samples import fleet

A = BackendConfig("http://a:1", "a", ("m",))
B = BackendConfig("http://b:1", "b", ("m", "n"))


def names(made: Fleet, model: str) -> list[str]:
    return [one.name for one in made.serving(made.model(model))]


def test_those_that_stay_keep_their_state() -> None:
    made = fleet([A])
    first = made.get("a")
    assert first is not None
    first.begin(Load(10, 0), 0.0, vision=False)
    first.healthy = False
    version = made.version
    assert made.update([A, B], 100.0) == (["b"], [])
    assert made.get("a") is first
    assert first.requests == 1
    assert made.version > version
    assert made.update([A, B], 101.0) == ([], [])
    assert [one.name for one in made] == ["a", "b"]


def test_a_key_that_changes_in_its_file_is_used(tmp_path: Path) -> None:
    """A rotated key of an engine was used for engines that came later only, and the others answered 401."""
    file = tmp_path / "key"
    file.write_text("old\n")
    made = fleet([replace(A, api_key_file=str(file))])
    one = made.get("a")
    assert one is not None
    file.write_text("new\n")
    assert made.update([replace(A, api_key_file=str(file))], 1.0) == ([], [])
    assert made.get("a") is one
    assert one.key == "new"


def test_those_that_go_finish_their_work() -> None:
    made = fleet([A, B])
    gone = made.get("a")
    assert gone is not None
    load = Load(10, 5)
    gone.begin(load, 0.0, vision=True)
    assert made.update([B], 1.0) == ([], ["a"])
    assert (gone.removed, gone.requests, gone.accepts(1.0, vision=False)) == (True, 1, False)
    gone.end(load)
    assert gone.tokens == 0
    assert len(made) == 1
    assert names(made, "m") == ["b"]


def test_a_changed_backend_is_a_new_one() -> None:
    made = fleet([A])
    old = made.get("a")
    changed = BackendConfig("http://a:2", "a", ("m",))
    assert made.update([changed], 1.0) == (["a"], [])
    assert made.get("a") is not old
    assert old is not None
    assert old.removed
    new = made.get("a")
    assert new is not None
    assert not new.removed


def test_one_that_joins_starts_slowly_and_the_first_ones_do_not() -> None:
    made = Fleet(ResilienceSettings())
    made.configure([ModelConfig("m")])
    made.update([A], 1000.0)
    made.update([A, B], 2000.0)
    first, second = made.get("a"), made.get("b")
    assert first is not None
    assert second is not None
    assert first.weight(1000.0) == 1.0
    assert second.weight(2000.0) == LEAST_SHARE


def test_a_key_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    made = fleet([A])
    version, wrong = made.version, BackendConfig("http://c:1", "c", api_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"backend 'c': .* cannot be read") as caught:
        made.update([B, wrong], 1.0)
    assert caught.value.param == "api_key_file"
    assert [one.name for one in made] == ["a"]
    assert made.version == version
    (tmp_path / "key").write_text(" secret\n")
    made.update([A, BackendConfig("http://c:1", "c", api_key_file=str(tmp_path / "key"))], 1.0)
    assert made.get("c").key == "secret"  # type: ignore[union-attr]


def test_models_and_aliases() -> None:
    made = fleet([A, B])
    made.configure(
        [ModelConfig("large", aliases=("gpt", "big"), served="m"), ModelConfig("only-b", backends=("b",))]
    )
    assert made.model("gpt") is made.model("large") is made.model("big")
    assert names(made, "gpt") == ["a", "b"]
    assert names(made, "only-b") == []
    assert [model.name for model in made.models()] == ["large", "only-b", "n"]


def test_the_name_that_backends_use_is_not_for_clients() -> None:
    made = fleet([A, B])
    made.configure([ModelConfig("large", served="m")])
    with pytest.raises(NotFound):
        made.model("m")


@pytest.mark.parametrize("name", ["x", "x" * 5000, "", "\n"])
def test_an_unknown_model_is_an_error_that_lists_the_known_ones(name: str) -> None:
    made = fleet([A, B])
    with pytest.raises(NotFound, match="served: m, n") as caught:
        made.model(name)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert len(caught.value.message) < 300
    with pytest.raises(NotFound, match="none yet"):
        fleet([]).model(name)


def test_no_name_is_the_only_model() -> None:
    assert fleet([A]).model("").name == "m"
    made = fleet([A])
    made.configure([ModelConfig("large", aliases=("gpt",), served="m")])
    assert made.model("").name == "large"


def test_learned_models() -> None:
    made = fleet([BackendConfig("http://c:1", "c")])
    one = made.get("c")
    assert one is not None
    version = made.version
    made.learn_models(one, ["x", "y"])
    assert names(made, "x") == ["c"]
    assert made.version == version + 1
    made.learn_models(one, ["y", "x"])
    assert made.version == version + 1
    made.learn_models(one, ["y"])
    with pytest.raises(NotFound):
        made.model("x")


def test_a_backend_that_is_named_by_a_model_serves_it_before_it_told_so() -> None:
    made = fleet([BackendConfig("http://c:1", "c"), BackendConfig("http://d:1", "d")])
    made.configure([ModelConfig("x", backends=("c",)), ModelConfig("y")])
    assert names(made, "x") == ["c"]
    assert names(made, "y") == []
    one = made.get("c")
    assert one is not None
    made.learn_models(one, ["other"])
    assert names(made, "x") == []


def test_drained_backends(tmp_path: Path) -> None:
    made, path = fleet([A, B]), tmp_path / "drains"
    Drains(path).set("a", drain=True)
    other = Drains(path)
    other.apply(made, 5.0)
    first = made.get("a")
    assert first is not None
    assert [one.draining for one in made] == [True, False]
    other.set("a", drain=False)
    Drains(path).apply(made, 100.0)
    assert [one.draining for one in made] == [False, False]
    assert first.weight(100.0) == LEAST_SHARE
    alone = Drains()
    alone.set("b", drain=True)
    alone.apply(made, 0.0)
    assert [one.draining for one in made] == [False, True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["drains"]
