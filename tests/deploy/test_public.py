"""One list of public paths: each rendered front passes on what is public, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fovea.deploy.front import EXACT, FOLDERS, is_public
from fovea.deploy.spec import DeploySpec, Gateway, Pool
from fovea.deploy.target import render
from tests.support.thorough import examples

SPECS = {
    "gateway": DeploySpec(pools=(Pool(name="a"),), gateway=Gateway()),
    "pools": DeploySpec(pools=(Pool(name="a", replicas=2), Pool(name="b"))),
}
WORDS = st.sampled_from(
    ["v1", "ui", "admin", "metrics", "health", "ready", "v10", "v", "chat", "keys", "", "x.y", "V1"]
)
PATHS = (
    st.lists(WORDS, max_size=4).map(lambda parts: "/" + "/".join(parts))
    | st.sampled_from(EXACT)
    | st.sampled_from(FOLDERS).flatmap(lambda folder: st.text("abc/.-_", max_size=6).map(folder.__add__))
)


def _nginx(text: str) -> Callable[[str], bool]:
    found = re.findall(r"location (=|~)? ?(\S+) \{\s+proxy_pass http://fovea", text)
    own = [(kind, path) for kind, path in found if not path.startswith("@")]
    assert own
    return lambda path: any(path == each if kind == "=" else re.search(each, path) for kind, each in own)


def _haproxy(text: str) -> Callable[[str], bool]:
    exact = " ".join(re.findall(r"acl public path (.*)", text)).split()
    begins = tuple(" ".join(re.findall(r"acl public path_beg (.*)", text)).split())
    assert "unless public" in text
    return lambda path: path in exact or path.startswith(begins)


def _envoy(text: str) -> Callable[[str], bool]:
    def regexes(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["safe_regex"]["regex"]} if "safe_regex" in value else set()
            return own.union(*map(regexes, value.values()))
        return set().union(*map(regexes, value)) if isinstance(value, list) else set()

    (found,) = regexes(yaml.safe_load(text))
    return lambda path: re.fullmatch(found, path) is not None


def _matches(rules: list[dict[str, Any]], key: str) -> Callable[[str], bool]:
    matches = [match for rule in rules for match in rule.get("match") or rule.get("matches") or [{}]]
    assert all(key in match for match in matches), "a rule without a path passes everything on"

    def passes(path: str) -> bool:
        for match in matches:
            found = match[key]
            exact = found.get("exact", found.get("value"))  # a PathPrefix is the path, too
            below = found.get("prefix", f"{exact}/" if found.get("type") == "PathPrefix" else None)
            if path == exact or (below is not None and path.startswith(below)):
                return True
        return False

    return passes


def fronts(spec: DeploySpec) -> dict[str, Callable[[str], bool]]:
    """Return what each rendered front passes on."""
    files = render(spec, ["nginx", "haproxy", "envoy", "istio", "gateway-api"])
    compose = render(spec, ["compose"])
    routes = {
        path: [rule for each in yaml.safe_load_all(text) for rule in each["spec"]["rules"]]
        for path, text in files.items()
        if path.endswith(("/route.yaml", "inference-pool/routes.yaml"))
    }
    assert len(routes) == 2
    istio = yaml.safe_load(files["istio/routes.yaml"])["spec"]["http"]
    return {
        "nginx": _nginx(files["nginx.conf"]),
        "compose": _nginx(compose["nginx/nginx.conf"]),
        "haproxy": _haproxy(files["haproxy.cfg"]),
        "envoy": _envoy(files["envoy.yaml"]),
        "istio": _matches(istio, "uri"),
        **{path: _matches(rules, "path") for path, rules in routes.items()},
    }


FRONTS = {
    f"{name}: {front}": passes for name, spec in SPECS.items() for front, passes in fronts(spec).items()
}


@settings(max_examples=examples(300), deadline=None)
@given(PATHS)
def test_each_front_passes_on_the_public_paths_and_no_other(path: str) -> None:
    for front, passes in FRONTS.items():
        assert bool(passes(path)) == is_public(path), (front, path)


def test_secrets_of_the_operator_are_never_public() -> None:
    for path in ("/admin", "/admin/", "/admin/keys", "/metrics", "/v10", "/docs", "/openapi.json"):
        assert not is_public(path)
    for path in (*EXACT, "/v1/chat/completions", "/ui/page.js"):
        assert is_public(path)


def test_kserve_opens_no_engine_to_everybody() -> None:
    """Its own routes have no list of paths, so its services stay within the cluster."""
    for path, text in render(SPECS["pools"], ["kserve"]).items():
        for each in yaml.safe_load_all(text) if "pool-" in path else ():
            if each["kind"] == "InferenceService":
                labels = each["metadata"]["labels"]
                assert labels["networking.kserve.io/visibility"] == "cluster-local"
                assert labels["networking.knative.dev/visibility"] == "cluster-local"
