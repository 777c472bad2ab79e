from pathlib import Path
from typing import Any

import pytest

from fovea.cli.deploy import known_settings
from fovea.core.errors import ConfigError
from fovea.core.settings import build_settings, settings_of
from fovea.deploy.read import KnownSettings, read_spec, spec_of, unused_images
from fovea.deploy.spec import DeploySpec, Gateway, Pool, Redis, Stop
from fovea.deploy.target import render
from fovea.gateway.settings import GatewaySettings
from fovea.server.settings import BodySettings
from tests.deploy.specs import FULL

KNOWN = KnownSettings(("max_queue", "host"), ("workers",))
POOL: dict[str, Any] = {"name": "tiny"}


def of(**values: Any) -> DeploySpec:
    return spec_of({"pool": [POOL], **values}, KNOWN)


def test_the_example_of_the_docstring_is_a_spec(tmp_path: Path) -> None:
    import fovea.deploy.spec as module

    text = (module.__doc__ or "").split("\n\n", 2)[1:]
    lines = "\n\n".join(text).split("Every table")[0]
    path = tmp_path / "deploy.toml"
    path.write_text("\n".join(line.removeprefix("    ") for line in lines.splitlines()))
    spec = read_spec(path, known_settings())
    assert spec.name == "vlm"
    assert spec.pools[0].settings == {"max_queue": 64}
    assert spec.gateway is not None
    assert spec.gateway.replicas == 2
    assert spec.redis is not None
    assert spec.monitoring is not None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pool": []}, "0 [[pool]] are given; accepted: 1 to 50"),
        ({"pool": {}}, "accepted: [[pool]]"),
        ({"nme": "x"}, "unknown key 'nme'; did you mean 'name'?"),
        ({"gateway": 3}, "[gateway] is 3; accepted: a table"),
        ({"gateway": {"workers": 1}}, "[gateway]: unknown key 'workers'"),
        ({"gateway": {"settings": {"worker": 1}}}, "[gateway] settings: unknown key 'worker'; did you mean"),
        ({"redis": {}}, "only the gateway uses [redis]"),
        ({"pool": [{"name": "A"}]}, "[[pool]] number 1: name is 'A'"),
        ({"pool": [POOL, POOL]}, "'tiny' is given twice"),
        ({"pool": [POOL, {"name": "b", "model": "Qwen/x"}]}, "needs [gateway]"),
        ({"pool": [{"name": "a", "settings": {"host": "x"}}]}, "holds host, which is rendered"),
        ({"pool": [{"name": "a", "settings": {"device": "cpu"}}]}, "in its place: hardware of [[pool]]"),
        ({"gateway": {"settings": {"keys_file": "x"}}}, "holds keys_file, which is rendered"),
        (
            {"gateway": {"settings": {"redis": "redis://x"}}, "redis": {}},
            "accepted in its place: [redis], or",
        ),
        ({"pool": [{"name": "a", "replicas": 3, "max_replicas": 2}]}, "max_replicas is 2; accepted: 0, or 3"),
        ({"pool": [{"name": "a", "gpu": "T4"}]}, "but hardware is cpu"),
        ({"pool": [{"name": "a", "weights_gib": 9}]}, "accepted: a hub id, or no weights_gib"),
        ({"pool": [{"name": "a", "weights_image": "x:1"}]}, "accepted: an absolute folder, such as /models"),
        ({"tls": True, "proxy_port": 80}, "proxy_port and redirect_port are both 80"),
        ({"trusted_proxies": ["10.0.0.0/33"]}, "accepted: addresses and networks"),
        ({"images": {"redis": "redis:8:x"}}, "[images]: redis is 'redis:8:x'; accepted: an image"),
        ({"monitoring": {"alert_webhook_file": "urls"}}, "accepted: an absolute path"),
        ({"monitoring": {"alert_webhook_file": "/a", "alert_webhook": "http://x/"}}, "one of them"),
        ({"images": {"redis": "redis 8"}}, "[images]: redis is 'redis 8'; accepted: an image"),
        ({"images": {"redys": "redis:8"}}, "[images]: unknown key 'redys'; did you mean 'redis'?"),
        ({"tracing": {"backend": "http://x"}}, "accepted: HOST:PORT, such as tempo.example.com:4317"),
        ({"tracing": {"backend": "tempo:65536"}}, "accepted: HOST:PORT, such as tempo.example.com:4317"),
        ({"tracing": {}, "monitoring": {"otlp_endpoint": "http://c:4318"}}, "accepted: one of them"),
        ({"kubernetes": {"tls_ends": "proxy"}}, "accepted: pods, gateway"),
        ({"pool": [{"name": "a", "hardware": "cuda", "mig": "3g.20gb"}]}, "mig needs gpu"),
        (
            {"pool": [{"name": "a", "hardware": "cuda", "gpu": "A100-40GB", "mig": "9g.40gb"}]},
            "profiles of A100-40GB: 1g.5gb",
        ),
        ({"pool": [{"name": "a", "hardware": "cuda", "gpu": "T4", "mig": "1g.5gb"}]}, "none, it has no MIG"),
        ({"pool": [{"name": "a", "settings": {"max_queue": {}}}]}, "settings: max_queue is {}; accepted: a"),
        ({"gateway": {"settings": {"workers": ["a\nb"]}}}, "settings: workers is"),
        ({"host": "a b"}, "host is 'a b'; accepted: a DNS name"),
        ({"image": "x; rm -rf /"}, "accepted: an image"),
        ({"monitoring": {"alert_webhook": "http://x/y?z={{"}}, "accepted: http://HOST:PORT/PATH"),
        ({"monitoring": {"alert_webhook": "http://a:b@x/y"}}, "/PATH, without user, query and fragment"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_is_accepted(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(**values)
    assert words in error.value.message


WRONG = """
nme = "vlm"
host = "a b"
[[pool]]
name = "A"
cpu = 3
[[pool]]
name = "b"
settings = { max_queu = 64, host = "x" }
[pool.extra]
[gateway]
replicas = 0
[gateway.settings]
worker = 2
"""


def test_all_errors_of_a_spec_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "deploy.toml"
    path.write_text(WRONG)
    with pytest.raises(ConfigError) as caught:
        read_spec(path, KNOWN)
    expected = (
        "2: unknown key 'nme'; did you mean 'name'?",
        "3: host is 'a b'; accepted: a DNS name",
        "5: [[pool]] number 1: name is 'A'; accepted: ",
        "6: [[pool]] number 1: unknown key 'cpu'; did you mean 'cpus'?",
        "9: [[pool]] number 2 settings holds host, which is rendered",
        "9: [[pool]] number 2 settings: unknown key 'max_queu'; did you mean 'max_queue'?",
        "10: [[pool]] number 2: unknown key 'extra'",
        "12: [gateway]: replicas is 0; accepted: 1 to 100",
        "14: [gateway] settings: unknown key 'worker'; did you mean 'workers'?",
    )
    found = [each.message for each in caught.value.findings]
    assert len(found) == len(expected)
    for message, beginning in zip(found, expected, strict=True):
        assert message.startswith(f"{path}:{beginning}")


def test_the_grace_period_is_longer_than_everything_before_the_kill() -> None:
    stop = Stop(pre_stop_s=5, lame_duck_s=7, drain_s=60, margin_s=3)
    assert stop.grace_s == 75
    assert stop.grace_s > stop.pre_stop_s + stop.lame_duck_s + stop.drain_s


@pytest.mark.parametrize("notice", [10, 15, 30, 60, 120, 300])
def test_a_spot_engine_ends_within_its_notice(notice: int) -> None:
    spec = DeploySpec(pools=(Pool(name="spot", spot=True, spot_notice_s=notice),), stop=Stop(drain_s=600))
    stop = spec.stop_of(spec.pools[0])
    assert stop.grace_s <= notice
    assert stop.drain_s >= notice // 3


def test_settings_of_an_engine_follow_the_spec_and_its_own_settings_win() -> None:
    settings = FULL.engine_settings(FULL.pools[0])
    assert settings["max_queue"] == 64
    assert settings["served_model_name"] == "Qwen3-VL-4B-Instruct"
    assert settings["device"] == "cuda"
    assert set(settings) <= {*known_settings().engine, "model"}
    assert set(FULL.gateway_settings()) <= {*known_settings().gateway, "host", "port"}


def test_a_simulated_engine_has_no_model_and_no_device() -> None:
    spec = DeploySpec(pools=(Pool(name="tiny", settings={"simulate": True}),))
    settings = spec.engine_settings(spec.pools[0])
    assert settings["simulate"] is True
    assert "model" not in settings
    assert "device" not in settings


@pytest.mark.parametrize("mib", [1, 256, 257, 512, 513, 1024])
def test_engines_and_gateways_accept_the_largest_body(mib: int) -> None:
    spec = DeploySpec(pools=(Pool(name="tiny"),), gateway=Gateway(), max_body_mib=mib)
    engine = build_settings(BodySettings, _only(BodySettings, spec.engine_settings(spec.pools[0])))
    assert engine.max_body_mib == mib
    gateway = build_settings(GatewaySettings, _only(GatewaySettings, spec.gateway_settings()))
    assert gateway.max_body_mib == mib


def _only(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in settings_of(cls)}
    return {name: value for name, value in values.items() if name in names}


def test_values_of_settings_are_checked_with_their_lines(tmp_path: Path) -> None:
    """They were rendered as they are, and every engine ended at its start."""
    path = tmp_path / "deploy.toml"
    path.write_text(
        '[[pool]]\nname = "a"\n[pool.settings]\nquantization = "fp9"\nmax_queue = -1\n'
        '[gateway]\nsettings = { policy = "zz" }\n'
    )
    with pytest.raises(ConfigError) as error:
        read_spec(path, known_settings())
    for line in (
        f"{path}:7: [gateway] settings: policy is 'zz'; accepted: cache-affine, ",
        f"{path}:4: [[pool]] number 1 settings: quantization is 'fp9'; accepted: none, ",
        f"{path}:5: [[pool]] number 1 settings: max_queue is -1; accepted: 0 to ",
    ):
        assert line in str(error.value)


def test_paths_of_settings_are_those_of_the_servers() -> None:
    """A folder of a container need not be on the machine that renders."""
    pool = {"name": "a", "settings": {"file_root": "/only/there"}}
    assert spec_of({"pool": [pool]}, known_settings()).pools[0].settings == pool["settings"]


@pytest.mark.parametrize("value", ["1; evil", [1], -1, 1e400, float("nan"), True])
@pytest.mark.parametrize(("name", "target"), [("workers", "local"), ("max_connections_per_address", "nginx")])
def test_a_setting_that_a_proxy_needs_as_a_number_is_one(name: str, target: str, value: Any) -> None:
    spec = DeploySpec((Pool("tiny"),), gateway=Gateway(settings={name: value}), redis=Redis())
    with pytest.raises(ConfigError, match=f"settings: {name} is .*accepted: a whole number"):
        render(spec, [target])


def test_a_redis_of_your_own_is_a_setting_without_the_table_redis() -> None:
    gateway = {"settings": {"redis": "redis://10.0.0.9/0"}}
    spec = spec_of({"pool": [POOL], "gateway": gateway}, known_settings())
    assert spec.gateway is not None
    assert spec.gateway.settings == gateway["settings"]


@pytest.mark.parametrize(
    "url", ["https://x.example/hook/SECRET?sig=SECRET", "https://SECRET:SECRET@x.example/"]
)
def test_an_error_about_the_url_of_alerts_shows_its_host_only(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        of(monitoring={"alert_webhook": url})
    assert "alert_webhook is 'https://x.example/...'; accepted: " in str(error.value)
    assert "alert_webhook_file" in str(error.value)
    assert "SECRET" not in str(error.value)


def test_images_that_nothing_uses_are_told_with_what_would_use_them() -> None:
    images = dict.fromkeys(("nginx", "redis", "alertmanager", "collector", "jaeger"), "x:1")
    own = {"backend": "tempo:4317"}
    spec = of(images=images, monitoring={"alert_webhook_file": "/etc/vlm/alerts"}, tracing=own)
    assert unused_images(spec) == [
        "[images] redis is not used; accepted: [redis], or no redis",
        "[images] jaeger is not used; accepted: [tracing] without backend, or no jaeger",
    ]
    assert unused_images(of(images=images, tracing={}, redis={}, gateway={}, monitoring={})) == [
        "[images] alertmanager is not used; accepted: alert_webhook of [monitoring], or no alertmanager"
    ]
