"""Downloads the CustomResourceDefinitions of the operators whose objects are rendered, by pinned version.

    python -m tools.crds                     # into .crds; `make crd-schemas` does the same
    python -m tools.crds --mirrors FOLDER    # from clones in FOLDER/OWNER+NAME/repo, without the network

They are the work of other projects, and large, so they are not kept here. tests/deploy/test_crds.py compares
the rendered objects with them, and `make test-apiserver` gives them to a real API server.
"""

from __future__ import annotations

import argparse
import subprocess
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".crds"
SOURCES = (
    ("kedacore/keda", "v2.20.2", ("config/crd/bases/keda.sh_scaledobjects.yaml",)),
    ("istio/istio", "1.30.3", ("manifests/charts/base/files/crd-all.gen.yaml",)),
    (
        "kubernetes-sigs/gateway-api",
        "v1.6.1",
        tuple(
            f"config/crd/standard/gateway.networking.k8s.io_{kind}.yaml"
            for kind in ("gateways", "httproutes")
        ),
    ),
    (
        "kubernetes-sigs/gateway-api-inference-extension",
        "v1.5.0",
        (
            "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
            "config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml",
        ),
    ),
    (
        "kserve/kserve",
        "v0.20.0",
        tuple(
            f"config/crd/full/serving.kserve.io_{kind}.yaml"
            for kind in ("inferenceservices", "servingruntimes")
        ),
    ),
    ("kubernetes-sigs/lws", "v0.10.0", ("config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",)),
    ("ray-project/kuberay", "v1.7.0", ("ray-operator/config/crd/bases/ray.io_rayservices.yaml",)),
    (
        "prometheus-operator/prometheus-operator",
        "v0.93.0",
        tuple(
            f"example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml"
            for kind in ("podmonitors", "prometheusrules")
        ),
    ),
    ("cert-manager/cert-manager", "v1.20.3", ("deploy/crds/cert-manager.io_certificates.yaml",)),
)
"""Repository, version, and paths of the files."""


def download(repository: str, version: str, path: str) -> bytes:
    """Return a file of a repository."""
    address = f"https://raw.githubusercontent.com/{repository}/{version}/{path}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        text: bytes = answer.read()
    return text


def from_mirror(folder: Path, repository: str, version: str, path: str) -> bytes:
    """Return a file of a clone."""
    clone = folder / repository.replace("/", "+") / "repo"
    return subprocess.check_output(["git", "-C", str(clone), "show", f"{version}:{path}"])


def main(arguments: list[str] | None = None) -> int:
    """Write the files. Returns 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mirrors", type=Path, metavar="FOLDER")
    mirrors = parser.parse_args(arguments).mirrors
    FOLDER.mkdir(exist_ok=True)
    for repository, version, paths in SOURCES:
        for path in paths:
            text = (
                from_mirror(mirrors, repository, version, path)
                if mirrors
                else download(repository, version, path)
            )
            (FOLDER / path.rpartition("/")[2]).write_bytes(text)
            print(f"{repository} {version}: {path.rpartition('/')[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
