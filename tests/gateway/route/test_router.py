"""The router offers a policy only backends that accept the request and were not tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import ConfigError
from fovea.gateway.backends.backend import VISION, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.settings import POLICIES, RouteSettings
from tests.gateway.samples import MODEL, demand, fleet

LOAD = Load(10, 0)


def three() -> Fleet:
    return fleet([BackendConfig(f"http://{name}:1", name, ("m",)) for name in "abc"])


@given(st.sampled_from(POLICIES), st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))
def test_only_backends_that_accept_and_were_not_tried(policy: str, away: set[str], tried: set[str]) -> None:
    made = three()
    for one in made:
        one.draining = one.name in away
    choice = Router(made, RouteSettings(policy=policy), lambda: 0.0).choose(MODEL, demand(), LOAD, tried)
    able = set("abc") - away - tried
    assert (choice is not None) == bool(able)
    assert choice is None or choice.backend.name in able


def test_a_model_may_have_its_own_policy() -> None:
    router = Router(three(), RouteSettings(), lambda: 0.0)
    reasons = []
    for model in (MODEL, ModelConfig("m", policy="round-robin"), ModelConfig("m", policy="least-busy")):
        choice = router.choose(model, demand(), LOAD)
        assert choice is not None
        reasons.append(choice.reason)
    assert reasons == ["prefix", "round-robin", "least-busy"]
    with pytest.raises(ConfigError):
        ModelConfig("m", policy="fastest")


def test_one_backend_needs_no_policy() -> None:
    made = fleet([BackendConfig("http://a:1", "a", ("m",))])
    router = Router(made, RouteSettings(), lambda: 0.0)
    choice = router.choose(MODEL, demand(), LOAD)
    assert choice is not None
    assert choice.reason == "only"
    assert router.choose(MODEL, demand(), LOAD, ["a"]) is None


def test_a_broken_vision_stage_gets_texts_only() -> None:
    made = fleet([BackendConfig("http://a:1", "a", ("m",))])
    one = made.get("a")
    assert one is not None
    for _ in range(5):
        one.breakers[VISION].fail(0.0)
    router = Router(made, RouteSettings(), lambda: 0.0)
    assert router.choose(MODEL, demand("x", "image"), LOAD) is None
    assert router.choose(MODEL, demand("x"), LOAD) is not None
    assert "a: breaker open" in router.unavailable(MODEL, demand("x", "image")).message


def test_the_error_names_every_reason() -> None:
    made = three()
    first, second, _ = made
    first.draining, second.busy_until = True, 9.0
    error = Router(made, RouteSettings(), lambda: 0.0).unavailable(MODEL, demand())
    assert error.status == 503
    assert error.code == "no_backend"
    assert "'m'" in error.message
    assert "a: draining, b: busy, c: failed" in error.message
    assert (
        "none is known"
        in Router(fleet([]), RouteSettings(), lambda: 0.0).unavailable(MODEL, demand()).message
    )
