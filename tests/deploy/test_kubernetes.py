"""Manifests for Kubernetes: what they say, and the tools that check them."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fovea.cli.deploy import known_settings
from fovea.core.errors import ConfigError
from fovea.deploy import target as check
from fovea.deploy.lint import lint
from fovea.deploy.lint.__main__ import main as lint_main
from fovea.deploy.lint.pods import PROBES
from fovea.deploy.read import read_spec
from fovea.deploy.spec import DeploySpec, Gateway, Pool, Scale
from fovea.deploy.tables import Kubernetes, Tracing
from fovea.deploy.target import render, target
from fovea.deploy.targets.kserve import DEFAULT_MAX_RUNNING
from fovea.deploy.targets.kubernetes.pods import weights_key
from fovea.deploy.targets.kubernetes.workloads import DOWNLOAD
from fovea.deploy.write import write
from fovea.engine.config import EngineConfig
from fovea.gateway.config import read_tables
from tests.deploy import manifests
from tests.deploy.specs import FULL, SMALL
from tests.support.programs import needs
from tests.support.thorough import others_slow

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def objects(path: str, spec: str = "full") -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(manifests.files(spec)[path]) if each]


def outcomes(name: str, spec: DeploySpec, folder: Path) -> dict[str, check.CheckOutcome]:
    found = [check.run_check(each, folder) for each in target(name).load().checks(spec)]
    return {f"{each.check.tool}: {each.check.subject}": each for each in found}


@needs("kubernetes-validate", "kubectl")
def test_the_tools_accept_what_is_rendered_and_refuse_a_misspelt_field(tmp_path: Path) -> None:
    write(render(SMALL, ["kubernetes"]), tmp_path)
    before = outcomes("kubernetes", SMALL, tmp_path)
    assert {name: each.output for name, each in before.items() if each.status != "passed"} == {}
    pool = tmp_path / "kubernetes" / "base" / "pool-tiny.yaml"
    pool.write_text(pool.read_text().replace("failureThreshold", "failureTreshold"))
    (tmp_path / "kubernetes" / "base" / "config" / "fovea-tiny.toml").unlink()
    after = outcomes("kubernetes", SMALL, tmp_path)
    assert {name for name, each in after.items() if each.status == "failed"} == set(before)


@pytest.mark.slow
@needs("kubernetes-validate", "kubectl")
@pytest.mark.parametrize("spec", manifests.SPECS)
@pytest.mark.parametrize("name", manifests.TARGETS)
def test_the_tools_accept_every_target(name: str, spec: str, tmp_path: Path) -> None:
    write(manifests.files(spec), tmp_path)
    if not (tmp_path / name).exists():
        return  # it refuses the spec, which another test is about
    found = outcomes(name, manifests.SPECS[spec], tmp_path)
    assert {key: each.output for key, each in found.items() if each.status == "failed"} == {}


@needs("kubectl")
@pytest.mark.parametrize("root", others_slow(("kubernetes", "leaderworkerset", "kserve"), ["kubernetes"]))
def test_pods_roll_when_their_configuration_changes(root: str, tmp_path: Path) -> None:
    """kustomize gives a ConfigMap another name if its text is another."""

    def mounted(spec: DeploySpec, root: str, folder: Path) -> str:
        write(render(spec, [root]), folder)
        command = [
            check.find_program("kubectl") or "",
            "kustomize",
            str(folder / root / "overlays" / "fixed"),
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = [line.split()[-1] for line in built.splitlines() if "name: fovea-tiny-config" in line]
        assert len(names) == 2  # the ConfigMap, and the volume that names it
        assert names[0] == names[1]
        return names[0]

    other = dataclasses.replace(SMALL, pools=(Pool(name="tiny", settings={"max_queue": 3}),))
    first = mounted(SMALL, root, tmp_path / "1")
    assert first != mounted(other, root, tmp_path / "2")
    assert first == mounted(SMALL, root, tmp_path / "3")


def test_the_first_deployment_of_the_page(tmp_path: Path) -> None:
    """Its spec renders, and its commands create the Secrets that pods need, with the keys that they read."""
    (tmp_path / "deploy.toml").write_text(PAGE.partition("```toml\n")[2].partition("```")[0])
    files = render(read_spec(tmp_path / "deploy.toml", known_settings()), ["kubernetes"])
    assert lint(files, "kubernetes/overlays/hpa") == []
    created = dict(re.findall(r"create secret generic (\S+) --from-(.*)", PAGE))
    namespace = yaml.safe_load(files["kubernetes/base/namespace.yaml"])
    assert set(namespace["metadata"]["annotations"]["fovea/secrets"].split(",")) <= set(created)
    for text in files.values():
        for name, key in re.findall(r"secretKeyRef:\s+name: (\S+)\s+key: (\S+)", text):
            assert f"{key}=" in created[name]


@needs("kubectl")
def test_an_overlay_joins_the_deployment_istio_and_its_sidecars(tmp_path: Path) -> None:
    """The overlay of docs/kubernetes.md."""
    write(manifests.files("full"), tmp_path)
    overlay = tmp_path / "kubernetes" / "overlays" / "mine"
    overlay.mkdir()
    text = PAGE.partition("overlays/mine/kustomization.yaml\n")[2].partition("```")[0]
    (overlay / "kustomization.yaml").write_text(text)
    command = [check.find_program("kubectl") or "", "kustomize", str(overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [each for each in yaml.safe_load_all(built) if each["kind"] == "Deployment"]
    assert len(found) == 5
    for each in found:
        proxy = each["spec"]["template"]["metadata"]["annotations"]["proxy.istio.io/config"]
        assert yaml.safe_load(proxy)["holdApplicationUntilProxyStarts"] is True
    assert lint_main([str(overlay)]) == 0


def test_configuration_files_hold_settings_that_exist() -> None:
    files, known = manifests.files("full"), known_settings()
    engine = tomllib.loads(files["kubernetes/base/config/vlm-qwen.toml"])
    assert set(engine) <= {*known.engine, "model"}
    assert engine["open_metrics"] is True
    gateway = tomllib.loads(files["kubernetes/base/config/vlm-gateway.toml"])
    tables = read_tables({"discover": gateway.pop("discover")})
    assert set(gateway) <= {*known.gateway, "host", "port"}
    services = {each["metadata"]["name"] for pool in FULL.pools for each in objects_of(pool, "Service")}
    assert {source.source for source in tables.discover} == {
        f"kubernetes:vlm/{name}:8000" for name in services
    }
    behind_kserve = tomllib.loads(files["kserve/base/config/vlm-gateway.toml"])
    assert behind_kserve["discover"][0]["from"] == "kubernetes:vlm/vlm-qwen-pods:8000"


def objects_of(pool: Pool, kind: str) -> list[dict[str, Any]]:
    return [each for each in objects(f"kubernetes/base/pool-{pool.name}.yaml") if each["kind"] == kind]


def test_an_engine_on_a_spot_machine_ends_within_its_notice() -> None:
    spot = next(pool for pool in FULL.pools if pool.spot)
    pod = objects_of(spot, "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] <= spot.spot_notice_s
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["matchExpressions"][0]["key"] for term in terms["nodeSelectorTerms"]]
    assert keys == [each["key"] for each in pod["tolerations"][1:]]
    assert "cloud.google.com/gke-spot" in keys


def test_startup_may_take_as_long_as_the_download() -> None:
    for pool in FULL.pools:
        probe = objects_of(pool, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 300 + 20 * pool.disk_gib


def test_a_large_cache_gets_a_volume_of_its_own() -> None:
    spec = dataclasses.replace(SMALL, pools=(Pool(name="big", disk_gib=500),))
    pod = yaml.safe_load_all(render(spec, ["kubernetes"])["kubernetes/base/pool-big.yaml"])
    volumes = next(iter(pod))["spec"]["template"]["spec"]["volumes"]
    claim = volumes[1]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["resources"]["requests"]["storage"] == "500Gi"


def test_only_the_gateway_has_a_token_and_may_list_endpoint_slices() -> None:
    tokens = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for path in manifests.files("full")
        if path.startswith("kubernetes/base/") and path.endswith(".yaml")
        for each in objects(path)
        if each["kind"] == "Deployment"
    }
    assert [name for name, has in tokens.items() if has] == ["vlm-gateway"]
    role = next(each for each in objects("kubernetes/base/gateway.yaml") if each["kind"] == "Role")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
    ]


def test_weights_of_pools_are_their_sizes_and_a_header_chooses_one() -> None:
    service = objects("istio/routes.yaml", "no-gateway")[0]
    *chosen, rest = service["spec"]["http"]
    for rule, name in zip(chosen, ("v1", "v2"), strict=True):
        assert {str(match["headers"]) for match in rule["match"]} == {str({"x-experiment": {"exact": name}})}
    assert [(each["destination"]["subset"], each["weight"]) for each in rest["route"]] == [
        ("v1", 90),
        ("v2", 10),
    ]
    behind_gateway = objects("istio/routes.yaml", "full")[0]["spec"]["http"]
    assert len(behind_gateway) == 1
    assert "subset" not in behind_gateway[0]["route"][0]["destination"]


def test_an_inference_pool_holds_all_pools_of_a_model() -> None:
    pools = objects("gateway-api/inference-pool/pools.yaml")
    found = {each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"] for each in pools}
    assert len(found) == 2
    pods = objects_of(FULL.pools[0], "Deployment") + objects_of(FULL.pools[1], "Deployment")
    for pod in pods:
        labels = pod["spec"]["template"]["metadata"]["labels"].items()
        assert [name for name, wanted in found.items() if wanted.items() <= labels] == [
            "vlm-qwen3-vl-4b-instruct-0d395f"
        ]


def test_kserves_default_of_running_requests_is_the_engines() -> None:
    assert EngineConfig().schedule.max_running == DEFAULT_MAX_RUNNING


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("kubernetes", DeploySpec(pools=(Pool(name="gateway"),)), "the name 'gateway' is used"),
        (
            "kubernetes",
            DeploySpec(pools=(Pool(name="a", max_replicas=2),), scale=Scale(shrink_after_s=3601)),
            "shrink_after_s is 3601; accepted by Kubernetes: 0 to 3600",
        ),
    ],
)
def test_what_cannot_run_is_refused(name: str, spec: DeploySpec, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(spec, [name])
    assert words in error.value.message


def secure(path: str) -> list[dict[str, Any]]:
    return objects(f"kubernetes/base/{path}", "secure")


def pod_of(found: list[dict[str, Any]], kind: str = "Deployment") -> dict[str, Any]:
    (only,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == kind)
    return dict(only)


def test_with_tls_the_pods_that_clients_reach_have_the_certificate() -> None:
    """Before, they spoke plain HTTP on a port named for TLS."""
    pod = pod_of(secure("gateway.yaml"))
    (gateway,) = pod["containers"]
    values = tomllib.loads(manifests.files("secure")["kubernetes/base/config/fovea-gateway.toml"])
    (mount,) = (each["mountPath"] for each in gateway["volumeMounts"] if each["name"] == "tls")
    assert (values["tls_cert"], values["tls_key"]) == (f"{mount}/tls.crt", f"{mount}/tls.key")
    assert all(gateway[kind]["httpGet"]["scheme"] == "HTTPS" for kind in PROBES)
    (volume,) = (each["secret"] for each in pod["volumes"] if each["name"] == "tls")
    (certificate,) = secure("certificate.yaml")
    assert certificate["spec"]["secretName"] == volume["secretName"]
    (port,) = secure("service.yaml")[0]["spec"]["ports"]
    assert (port["port"], port["appProtocol"]) == (443, "https")
    engine = pod_of(secure("pool-qwen.yaml"))["containers"][0]
    assert "scheme" not in engine["readinessProbe"]["httpGet"], "engines behind a gateway speak plain HTTP"
    monitors = objects("kubernetes/components/monitoring/pod-monitors.yaml", "secure")
    schemes = [each["spec"]["podMetricsEndpoints"][0].get("scheme") for each in monitors]
    assert schemes == [None, "https"]


@pytest.mark.parametrize("name", ["istio", "gateway-api", "kserve", "rayservice"])
def test_targets_that_cannot_give_pods_the_certificate_say_so(name: str) -> None:
    spec = DeploySpec(pools=(Pool(name="a"),), tls=True)
    with pytest.raises(ConfigError, match='tls_ends = "gateway"'):
        render(spec, [name])
    render(dataclasses.replace(spec, kubernetes=Kubernetes(tls_ends="gateway")), [name])


def test_the_certificate_is_where_the_gateway_reads_its_secret() -> None:
    """Istio's ingress gateway reads Secrets of its own namespace, and it found none there."""
    cluster = Kubernetes(tls_ends="gateway", issuer="ca", ingress_namespace="edge")
    spec = DeploySpec(pools=(Pool(name="a"),), name="vlm", tls=True, kubernetes=cluster)
    files = render(spec, ["kubernetes", "istio", "gateway-api"])
    places = {
        path: yaml.safe_load(text)["metadata"]["namespace"]
        for path, text in files.items()
        if path.endswith("/certificate.yaml")
    }
    assert places == {
        "istio/certificate.yaml": "edge",
        "gateway-api/service/certificate.yaml": "vlm",
        "gateway-api/inference-pool/certificate.yaml": "vlm",
    }
    for path in places:
        folder = path.rpartition("/")[0]
        assert "certificate.yaml" in yaml.safe_load(files[f"{folder}/kustomization.yaml"])["resources"]
    (server,) = (
        each
        for each in yaml.safe_load(files["istio/gateway.yaml"])["spec"]["servers"]
        if "credentialName" in each.get("tls", {})
    )
    certificate = yaml.safe_load(files["istio/certificate.yaml"])
    assert certificate["spec"]["secretName"] == server["tls"]["credentialName"]


def test_prometheus_has_a_key_of_its_own_role() -> None:
    texts = "".join(manifests.files("full").values())
    assert "admin-key" not in texts
    (gateway,) = (
        each["spec"]["podMetricsEndpoints"][0]
        for each in objects("kubernetes/components/monitoring/pod-monitors.yaml")
        if each["metadata"]["name"] == "vlm-gateway"
    )
    assert gateway["authorization"]["credentials"] == {"name": "vlm-metrics", "key": "key"}


def test_weights_are_downloaded_once_and_engines_wait_for_them() -> None:
    found = secure("pool-qwen.yaml")
    job, engine = pod_of(found, "Job"), pod_of(found)
    (claim,) = (each for each in found if each["kind"] == "PersistentVolumeClaim")
    claims = [
        each["persistentVolumeClaim"]
        for pod in (job, engine)
        for each in pod["volumes"]
        if each["name"] == "weights"
    ]
    assert claims == [
        {"claimName": claim["metadata"]["name"]},
        {"claimName": claim["metadata"]["name"], "readOnly": True},
    ]
    program, model, _, folder = job["containers"][0]["command"][2:]
    compile(program, "job", "exec")
    assert model == "Qwen/Qwen3-VL-4B-Instruct"
    variables = {each["name"]: each.get("value") for each in engine["containers"][0]["env"]}
    assert (variables["HF_HOME"], variables["HF_HUB_OFFLINE"]) == (folder, "1")
    assert f"{folder}/complete" in engine["initContainers"][1]["command"][2]
    other = dataclasses.replace(manifests.SECURE.pools[0], model="Qwen/other")
    assert weights_key(other) != weights_key(manifests.SECURE.pools[0])
    own = pod_of(secure("pool-own.yaml"))
    (image,) = (each["image"] for each in own["volumes"] if each["name"] == "weights")
    assert image["reference"] == "registry.example.com/own:1"


def test_the_job_of_weights_fills_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model needs no download, so its command can run here."""
    monkeypatch.setattr(sys, "argv", ["-c", "fovea-tiny", "", str(tmp_path)])
    exec(compile(DOWNLOAD, "the Job", "exec"), {})
    assert [path.name for path in tmp_path.iterdir()] == ["complete"]


def test_redis_has_a_disk_if_the_spec_wants_one() -> None:
    found = secure("redis.yaml")
    pod = pod_of(found)
    assert "yes" in pod["containers"][0]["command"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "fovea-redis"
    assert "volumes" not in pod_of(objects("kubernetes/base/redis.yaml"))


def test_servers_trust_the_proxies_of_the_spec_and_private_ones_otherwise() -> None:
    spec = DeploySpec(pools=(Pool(name="a"),), gateway=Gateway(), trusted_proxies=("192.0.2.7",))
    for target_name in ("kubernetes", "compose", "local", "systemd"):
        for path, text in render(spec, [target_name]).items():
            if path.endswith(".toml"):
                assert "192.0.2.7" in tomllib.loads(text)["trusted_proxies"], path
    values = tomllib.loads(manifests.files("full")["kubernetes/base/config/vlm-gateway.toml"])
    assert "10.0.0.0/8" in values["trusted_proxies"]


@pytest.mark.parametrize("name", ["compose", "kubernetes"])
def test_traces_go_to_the_collector_and_from_there_to_jaeger(name: str) -> None:
    """Names in the configurations are those of the pipelines, and the addresses those of the services."""
    files = render(manifests.SECURE, [name])
    prefix = "fovea-" if name == "kubernetes" else ""
    servers = [tomllib.loads(text) for path, text in files.items() if path.endswith(".toml")]
    for values in servers:
        assert values["otlp_endpoint"] == f"http://{prefix}collector:4317"
        assert values["otlp_protocol"] == "grpc"
    configs = {
        part: yaml.safe_load(text)
        for part in ("collector", "jaeger")
        for path, text in files.items()
        if path.endswith((f"{part}/config.yaml", f"config/{prefix}{part}.yaml"))
    }
    for config in configs.values():
        for pipeline in config["service"]["pipelines"].values():
            for kind, names in pipeline.items():
                assert set(names) <= set(config[kind])
        assert set(config["service"]["extensions"]) <= set(config["extensions"])
    assert configs["collector"]["exporters"]["otlp_grpc"]["endpoint"] == f"{prefix}jaeger:4317"
    source = next(text for text in files.values() if "fovea-jaeger" in text and "datasources" in text)
    assert "jaeger" in source
    own = dataclasses.replace(manifests.SECURE, tracing=Tracing(backend="tempo.example.com:4317"))
    texts = "".join(render(own, [name]).values())
    assert "endpoint: tempo.example.com:4317" in texts
    assert "max_traces" not in texts


def test_targets_without_a_collector_refuse_tracing() -> None:
    spec = DeploySpec(pools=(Pool(name="a"),), tracing=Tracing())
    with pytest.raises(ConfigError, match="accepted here: \\[monitoring\\] otlp_endpoint"):
        render(spec, ["local"])
