"""Applies all rendered manifests to a real API server: `make test-apiserver`.

    python -m tests.deploy.apiserver    # needs etcd and kube-apiserver, in PATH or in KUBEBUILDER_ASSETS

There are no nodes, so nothing runs. But the server decodes each object strictly, fills in defaults, and asks
its admission plugins: Pod Security, priorities, service accounts, limits. Pod Security only warns of a
Deployment; so each pod that an object describes is sent as a Pod, too (dry run). Custom resources need
`make crd-schemas`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml
from tools.crds import FOLDER as CRDS

from fovea.deploy.lint.objects import LOADER, Cluster, Object
from fovea.deploy.target import find_program
from fovea.deploy.write import write
from tests.deploy import manifests
from tests.support.servers import free_port

STARTUP_S = 120.0
TOKEN = "test-apiserver"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CORE = {"v1", "apps/v1", "batch/v1", "autoscaling/v2", "policy/v1", "networking.k8s.io/v1",
        "rbac.authorization.k8s.io/v1", "scheduling.k8s.io/v1"}  # fmt: skip


@dataclass(frozen=True)
class Api:
    """A running API server. client: sends requests to it, as its administrator."""

    client: httpx.Client
    resources: dict[str, dict[str, str]] = field(default_factory=dict)

    def ready(self) -> bool:
        """Tell whether it answers."""
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/readyz").is_success
        return False

    def path(self, each: Mapping[str, Any]) -> str:
        """Return the path of an object."""
        version, kind = each["apiVersion"], each["kind"]
        root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
        if kind not in self.resources.get(version, {}):
            listed = self.client.get(root).raise_for_status().json()["resources"]
            places = {True: "/namespaces/{}/", False: "/"}
            self.resources[version] = {
                one["kind"]: places[one["namespaced"]] + one["name"]
                for one in listed
                if "/" not in one["name"]
            }
        place = self.resources[version][kind].format(each["metadata"].get("namespace", "default"))
        return f"{root}{place}/{each['metadata']['name']}"

    def faults(self, objects: Iterable[dict[str, Any]], *, dry: bool = False) -> list[str]:
        """Apply objects, as `kubectl apply --server-side` does; return errors and warnings."""
        found = []
        options = {"fieldManager": "test", "force": "true", "fieldValidation": "Strict"}
        for each in objects:
            answer = self.client.patch(
                self.path(each),
                params={**options, **({"dryRun": "All"} if dry else {})},
                content=json.dumps(each, default=str),
                headers={"content-type": "application/apply-patch+yaml"},
            )
            where = f"{each['kind']} {each['metadata']['name']}: "
            found += [where + text for text in answer.headers.get_list("warning")]
            if not answer.is_success:
                found.append(where + answer.json()["message"])
        return found


def program(name: str) -> str:
    """Return the path of a program. Raises SystemExit."""
    places = os.pathsep.join([os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", "")])
    found = shutil.which(name, path=places) or find_program(name)
    if found is None:
        raise SystemExit(f"{name} is not installed; accepted: in PATH, or in the folder KUBEBUILDER_ASSETS")
    return found


@contextlib.contextmanager
def api_server() -> Iterator[Api]:
    """Start etcd and the API server, on the loopback interface."""
    with tempfile.TemporaryDirectory(prefix="fovea-api-") as name, contextlib.ExitStack() as stack:
        home = Path(name)
        store, peer, port = free_port(), free_port(), free_port()
        subprocess.run(
            ["openssl", "genrsa", "-out", str(home / "sa.key"), "2048"], check=True, capture_output=True
        )
        (home / "tokens").write_text(f"{TOKEN},admin,admin,system:masters\n")
        log = stack.enter_context((home / "log").open("wb"))
        for command in (
            [program("etcd"), "--data-dir", str(home / "etcd"),
             "--listen-client-urls", f"http://127.0.0.1:{store}",
             "--advertise-client-urls", f"http://127.0.0.1:{store}",
             "--listen-peer-urls", f"http://127.0.0.1:{peer}"],
            [program("kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{store}",
             "--cert-dir", str(home / "certs"), "--bind-address", "127.0.0.1", "--secure-port", str(port),
             "--service-account-issuer", "https://test", "--service-account-key-file", str(home / "sa.key"),
             "--service-account-signing-key-file", str(home / "sa.key"),
             "--token-auth-file", str(home / "tokens"), "--authorization-mode", "RBAC",
             "--service-cluster-ip-range", "10.0.0.0/24", "--endpoint-reconciler-type", "none"],
        ):  # fmt: skip
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        client = stack.enter_context(
            httpx.Client(
                base_url=f"https://127.0.0.1:{port}",
                headers={"authorization": f"Bearer {TOKEN}"},
                verify=False,
                trust_env=False,
                timeout=60,
            )
        )
        api, end = Api(client), time.monotonic() + STARTUP_S
        while not api.ready():
            if time.monotonic() > end or process.poll() is not None:
                sys.stderr.write((home / "log").read_text(errors="replace")[-4000:])
                raise SystemExit("the API server did not start")
            time.sleep(0.3)
        yield api


def install(api: Api) -> set[str]:
    """Create the CustomResourceDefinitions. Returns "GROUP/VERSION Kind" of each."""
    kinds: set[str] = set()
    for path in sorted(CRDS.glob("*.yaml")):
        found = [each for each in yaml.load_all(path.read_text(encoding="utf-8"), LOADER) if each]
        for each in found:
            spec = each["spec"]
            spec.pop("conversion", None)  # its webhook is not here
            kinds |= {
                f"{spec['group']}/{version['name']} {spec['names']['kind']}" for version in spec["versions"]
            }
        if faults := api.faults(found):
            raise SystemExit(f"{path.name}: {faults}")
    while not all(_established(each) for each in api.client.get(DEFINITIONS).json()["items"]):
        time.sleep(0.2)
    return kinds


def _established(definition: Mapping[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def pods(objects: list[dict[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """Return a Pod for each that the objects describe."""
    found = []
    for number, each in enumerate(Cluster(tuple(map(Object, objects))).pods()):
        spec = copy.deepcopy(dict(each.spec))
        if not spec.get("containers") or each.owner.kind == "InferenceService":
            continue  # KServe joins the runtime and the service itself
        for constraint in spec.get("topologySpreadConstraints", ()):
            constraint.pop("matchLabelKeys", None)  # a Deployment's pods have this label, these do not
        metadata = {"name": f"pod-{number}", "namespace": namespace, "labels": dict(each.labels)}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return found


def built(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization, or of a folder of manifests."""
    if not (folder / "kustomization.yaml").exists():
        text = "---\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml")))
    else:
        text = subprocess.check_output([program("kubectl"), "kustomize", str(folder)], text=True)
    return [each for each in yaml.load_all(text, LOADER) if each]


def apply(api: Api, files: Mapping[str, str], kinds: set[str]) -> Iterator[tuple[str, int, int, list[str]]]:
    """Apply each folder. Yields its name, the numbers of objects and pods, and the faults."""
    with tempfile.TemporaryDirectory() as place:
        write(dict(files), Path(place))
        for folder in manifests.folders(dict(files)):
            objects = [
                each
                for each in built(Path(place) / folder)
                if each["apiVersion"] in CORE or f"{each['apiVersion']} {each['kind']}" in kinds
            ]
            spaces = {each["metadata"].get("namespace") for each in objects} - {None}
            first = [each for each in objects if each["kind"] == "Namespace"]
            known = {each["metadata"]["name"] for each in first}
            first += [
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                for name in spaces - known
            ]
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
            }  # a controller makes it in each namespace
            first += [{**account, "metadata": {"name": "default", "namespace": name}} for name in spaces]
            faults = api.faults(first) + api.faults([each for each in objects if each["kind"] != "Namespace"])
            described = pods(objects, min(spaces, default="default"))
            faults += api.faults(described, dry=True)
            yield folder, len(objects), len(described), faults


def main() -> int:
    """Print a line for each folder. Returns 1 if an object was refused or warned of."""
    failed = 0
    with api_server() as api:
        print(api.client.get("/version").json()["gitVersion"], end=", ")
        wrong = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "wrong"}, "dta": {}}
        if not api.faults([wrong], dry=True):
            raise SystemExit("the server accepts a misspelt field, so it proves nothing")
        kinds = install(api)
        print(
            f"{len(kinds)} kinds of custom resources"
            if kinds
            else "no custom resources: run `make crd-schemas`"
        )
        for name, spec in manifests.SPECS.items():
            for folder, objects, described, faults in apply(
                api, manifests.rendered(replace(spec, name=name)), kinds
            ):
                print(
                    f"{'refused ' if faults else 'accepted'}  {name:10}  {folder:32}  "
                    f"{objects:3} objects  {described} pods"
                )
                for fault in faults:
                    print(f"    {fault}")
                failed += bool(faults)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
