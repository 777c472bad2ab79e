"""cluster.toml: what is read, what is refused and why; placement by bytes; the values that Ray Serve gets."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, replace
from typing import Any

import pytest

from fovea.cluster.ray.build import configuration, plan
from fovea.cluster.ray.ingress import environment, ranked
from fovea.cluster.ray.placement import GIB, bundles, needs, place, words
from fovea.cluster.ray.spec import ClusterSpec, Model, Role, spec_of
from fovea.cluster.scaling import ScaleSettings
from fovea.core.errors import ConfigError
from fovea.gateway.backends.route import order
from fovea.planner.shape import find

KNOWN = ("max_queue", "tensor_parallel", "kv_cache_mib", "target_ttft_ms", "model", "role", "cost")
QWEN = find("Qwen/Qwen2.5-VL-7B-Instruct")
TOML = """
address = "10.0.0.5:6379"
[ingress]
port = 8100
[[model]]
name = "qwen"
model = "Qwen/Qwen2.5-VL-7B-Instruct"
settings = { max_queue = 64, target_ttft_ms = 2000 }
[[model.role]]
role = "prefill-decode"
gpus = 1
gpu = "L40S"
scale = { replicas_min = 1, replicas_max = 3 }
[[model.role]]
role = "encode"
settings = { max_queue = 8 }
scale = { replicas_min = 1, replicas_max = 2 }
[[model]]
name = "sim"
simulate = true
"""


def spec(text: str = TOML) -> ClusterSpec:
    return spec_of(tomllib.loads(text), KNOWN)


def test_a_spec_is_read() -> None:
    found = spec()
    assert [model.name for model in found.models] == ["qwen", "sim"]
    qwen = found.models[0]
    assert qwen.ingress.role == "prefill-decode"
    assert qwen.ingress.scale.replicas_max == 3
    assert qwen.engine_settings(qwen.roles[1]) == {"max_queue": 8, "target_ttft_ms": 2000}
    assert found.models[1].roles == (Role(),)
    assert [found.prefix(model) for model in found.models] == ["/qwen", "/sim"]
    assert ClusterSpec((Model(),)).prefix(Model()) == "/"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("port = 8100", "prot = 8100", r"\[ingress\]: unknown key 'prot'; did you mean 'port'"),
        ("[ingress]", "[ingres]", "unknown key 'ingres'; did you mean 'ingress'"),
        ("max_queue = 64", "max_quue = 64", "settings: unknown key 'max_quue'; did you mean 'max_queue'"),
        ("max_queue = 64", 'role = "all"', "holds role, which each replica gets"),
        ("gpus = 1", "gpus = 1.5", "gpus is 1.5; accepted: a whole number"),
        ("gpus = 1\n", "", "gpu names a kind of GPU, but gpus is 0"),
        ('role = "encode"', 'role = "prefill"', "no engine asks those with the role prefill"),
        ('role = "prefill-decode"', 'role = "decode"', "no engine asks|the role decode asks"),
        ('role = "encode"', 'role = "all"', "2 of the roles answer clients"),
        ("replicas_min = 1, replicas_max = 3", "replicas_min = 4, replicas_max = 3", "above replicas_max"),
        ("replicas_min = 1, replicas_max = 3", "replica_max = 3", "did you mean 'replicas_max'"),
        ("replicas_min = 1, replicas_max = 3", "replicas_min = 0", "replicas_min is 0; accepted: 1"),
        ('name = "sim"', 'name = "qwen"', "the name 'qwen' is given twice"),
        ('name = "sim"', 'name = "A b"', "name is 'A b'; accepted: 1 to 42 lower-case"),
        ("10.0.0.5:6379", "ray://10.0.0.5:1", "address is 'ray://10.0.0.5:1'; accepted"),
    ],
)
def test_a_wrong_spec_is_refused(old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(ConfigError, match=message):
        spec(TOML.replace(old, new, 1))


def test_a_simulated_model_has_one_process_and_no_peers() -> None:
    with pytest.raises(ConfigError, match="accepted with simulate: 1"):
        Model(simulate=True, settings={"tensor_parallel": 2})
    with pytest.raises(ConfigError, match="accepted: the role all"):
        Model(simulate=True, roles=(Role(role="prefill-decode"), Role(role="encode")))


def test_bytes_come_from_the_planner_and_are_divided_among_ranks() -> None:
    model = Model(roles=(Role(gpus=1),))
    one = needs(model, model.roles[0], QWEN)
    assert 14 * GIB < one.weights < 17 * GIB
    assert one.device > one.weights
    divided = replace(model, settings={"tensor_parallel": 2})
    two = needs(divided, divided.roles[0], QWEN)
    assert one.weights / 2 < two.weights < one.weights  # the vision tower is not divided
    assert len(bundles(divided, divided.roles[0], two)) == 2
    cpu = needs(Model(), Role(), QWEN)
    assert (cpu.device, cpu.host) == (0, cpu.weights + cpu.kv + cpu.caches + cpu.process)
    encoder = needs(model, Role(role="encode"), QWEN)
    assert encoder.kv == 0
    assert encoder.weights < one.weights / 5


def test_a_model_that_does_not_fit_into_its_gpu_is_refused() -> None:
    model = Model(name="big", roles=(Role(gpus=1, gpu="T4"),))
    with pytest.raises(ConfigError, match=r"model big, role all: a replica fits nowhere: it needs .*weights"):
        bundles(model, model.roles[0], needs(model, model.roles[0], QWEN))
    fits = Role(gpus=1, gpu="L40S")
    assert bundles(Model(), fits, needs(Model(), fits, QWEN))[0]["GPU"] == 1
    half = Role(gpus=0.25, gpu="L40S", settings={"kv_cache_mib": 1024})
    with pytest.raises(ConfigError, match=r"0\.25 L40S has"):
        bundles(Model(), half, needs(Model(), half, QWEN))


def test_a_part_of_a_gpu_needs_a_bound_of_the_kv_pool() -> None:
    with pytest.raises(ConfigError, match="role all: gpus is 0.5, and without kv_cache_mib"):
        needs(Model(), Role(gpus=0.5), QWEN)
    assert needs(Model(), Role(role="encode", gpus=0.5), QWEN).device > 0


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    role = Role(memory_gib=1)
    needed = needs(Model(), role, QWEN)
    with pytest.raises(ConfigError, match="memory_gib is 1, and it needs .*; accepted: "):
        bundles(Model(), role, needed)
    assert "weights" in words(needed)
    assert "encoder cache" in words(needed)


def placed(role: Role, nodes: list[dict[str, float]], ranks: int = 1) -> Any:
    model = Model(name="m", simulate=ranks == 1, roles=(role,), settings={"tensor_parallel": ranks})
    wanted = bundles(model, role, needs(model, role, None))
    return place(ClusterSpec((model,)), {("m", role.role): wanted}, nodes)


def test_a_replica_that_fits_nowhere_is_refused_and_others_wait() -> None:
    node: dict[str, float] = {"CPU": 4, "memory": 4 * GIB}
    two = Role(cpus=3, scale=ScaleSettings(replicas_min=2, replicas_max=2))
    assert placed(two, [node, node]) == []
    (waiting,) = placed(two, [node])
    assert "no node has 3 CPU" in waiting.reason
    assert "replica 2 of 2" in waiting.reason
    with pytest.raises(
        ConfigError, match=r"a replica fits nowhere: it needs 8 CPU.* the nodes have 2 x \(4 CPU"
    ):
        placed(Role(cpus=8), [node, node])
    with pytest.raises(ConfigError, match="for each of 2 ranks"):
        placed(Role(cpus=3), [node], ranks=2)
    assert placed(Role(cpus=3), [node, node], ranks=2) == []
    with pytest.raises(ConfigError, match="the nodes have nothing"):
        placed(Role(), [])


def test_the_plan_of_an_engine() -> None:
    qwen = spec().models[0]
    answering, encoder = (plan(qwen, role) for role in qwen.roles)
    assert answering.peers == {"encode_peers": ("encode", 2)}
    assert answering.settings["device"] == "cuda"
    assert (answering.target_s, answering.answers, answering.has_peers) == (2.0, True, True)
    assert (encoder.peers, encoder.answers, encoder.settings["device"]) == ({}, False, "cpu")
    assert encoder.settings["max_queue"] == 8
    simulated = plan(spec().models[1], Role())
    assert simulated.settings["simulate"] is True
    assert not {"model", "device", "threads"} & simulated.settings.keys()


def resources(found: ClusterSpec) -> dict[tuple[str, str], list[dict[str, float]]]:
    return {
        (model.name, role.role): bundles(model, role, needs(model, role, None if model.simulate else QWEN))
        for model in found.models
        for role in model.roles
    }


def test_the_configuration_of_ray_serve() -> None:
    found = spec()
    config = configuration(found, resources(found), {"sim"})
    qwen, simulated = config["applications"]
    assert (qwen["name"], qwen["route_prefix"]) == ("qwen", "/qwen")
    answering, encoder = qwen["deployments"]
    assert (answering["name"], answering["ray_actor_options"]["num_gpus"]) == ("prefill-decode", 1)
    scaling = answering["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 3)
    assert ScaleSettings(**scaling["policy"]["policy_kwargs"]) == found.models[0].roles[0].scale
    assert encoder["autoscaling_config"]["max_replicas"] == 2  # scaled apart from the engines that answer
    assert answering["graceful_shutdown_timeout_s"] > found.models[0].drain_s
    assert answering["max_surge_percent"] == 0
    assert simulated["deployments"][0]["max_surge_percent"] > 0
    assert simulated["deployments"][0]["num_replicas"] == 1
    assert "request_router_config" not in answering
    own = replace(found, ingress=replace(found.ingress, haproxy=False))
    answering = configuration(own, resources(own), ())["applications"][0]["deployments"][0]
    assert answering["request_router_config"]["request_router_kwargs"] == {"balance": 2.0}


def test_another_number_of_replicas_changes_no_plan() -> None:
    """Ray Serve replaces replicas whose application has other arguments, and no others."""
    found = spec()
    more = TOML.replace("replicas_min = 1, replicas_max = 3", "replicas_min = 2, replicas_max = 3")
    before, after = (configuration(each, resources(each), ()) for each in (found, spec(more)))
    assert before["applications"][0]["args"] == after["applications"][0]["args"]
    other = spec(TOML.replace("max_queue = 64", "max_queue = 65"))
    assert (
        configuration(other, resources(other), ())["applications"][0]["args"]
        != before["applications"][0]["args"]
    )


def test_ranks_have_bundles_of_their_own() -> None:
    model = Model(name="m", roles=(Role(gpus=1),), settings={"tensor_parallel": 4})
    found = ClusterSpec((model,))
    (application,) = configuration(found, resources(found), ())["applications"]
    (deployment,) = application["deployments"]
    assert [bundle["GPU"] for bundle in deployment["placement_group_bundles"]] == [1, 1, 1, 1]
    assert application["args"]["plans"][0]["ranks"] == 4


def test_the_environment_tells_haproxy_how_to_choose_and_how_long_to_wait() -> None:
    found = environment(spec())
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    lines = found["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"].split("\n")
    assert lines[0] == "hdr(x-fovea-key)"
    assert lines[2].strip() == "hash-balance-factor 200"
    assert int(found["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > spec().drain_s
    plain = environment(replace(spec(), ingress=replace(spec().ingress, haproxy=False)))
    assert plain["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert not [name for name in plain if "HAPROXY" in name]


def test_replicas_are_ordered_as_the_gateway_orders_backends() -> None:
    names = ("a", "b", "c", "d")
    idle = dict.fromkeys(names, 0)
    for key in map(str, range(50)):
        assert ranked(key, idle, 2.0) == list(order(key, [(name, 1.0) for name in names]))
    first, second = ranked("key", idle, 2.0)[:2]
    busy = ranked("key", {**idle, first: 40}, 2.0)
    assert busy[0] == second
    assert busy[-1] == first  # full, but still the last resort
    others = {name: load for name, load in idle.items() if name != first}
    assert ranked("key", others, 2.0) == ranked("key", idle, 2.0)[1:]  # other keys keep their order
    assert ranked("", {"a": 3, "b": 1, "c": 2}, 2.0) == ["b", "c", "a"]
    assert ranked("key", {}, 2.0) == []


def test_a_plan_survives_its_way_as_json() -> None:
    import json

    from fovea.cluster.ray.build import Plan

    made = plan(spec().models[0], spec().models[0].roles[0])
    sent = json.loads(json.dumps(asdict(made)))
    assert asdict(Plan(**sent)) | {"peers": {}} == asdict(made) | {"peers": {}}
    assert tuple(sent["peers"]["encode_peers"]) == made.peers["encode_peers"]
