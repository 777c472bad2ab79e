"""Rendered manifests pass the linter, whatever the spec."""

from pathlib import Path

import pytest
from hypothesis import given, settings

from fovea.deploy.lint import lint
from fovea.deploy.lint.__main__ import main
from fovea.deploy.spec import DeploySpec
from fovea.deploy.write import write
from tests.deploy import manifests
from tests.support.thorough import examples


@pytest.mark.parametrize("spec", manifests.SPECS)
def test_every_folder_has_no_fault(spec: str) -> None:
    files = manifests.files(spec)
    for folder in manifests.folders(files):
        assert lint(files, folder) == [], folder


def test_routes_fit_the_services_of_the_deployment() -> None:
    """Apart from each other, nothing says whether a route's Service exists."""
    for spec in manifests.SPECS:
        files = manifests.files(spec)
        applied = next(each for each in manifests.folders(files) if each.startswith("kubernetes/overlays"))
        if "istio/kustomization.yaml" not in files:
            continue  # these targets refuse pods that end TLS
        assert lint(files, applied, "istio", "gateway-api/service") == []
        assert lint(files, applied, "gateway-api/inference-pool") == []


@settings(max_examples=examples(6), deadline=None)
@given(manifests.specs())
def test_random_specs_have_no_fault(spec: DeploySpec) -> None:
    files = manifests.rendered(spec)
    for folder in manifests.folders(files):
        assert lint(files, folder) == [], folder


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(manifests.specs())
def test_many_random_specs_have_no_fault(spec: DeploySpec) -> None:
    files = manifests.rendered(spec)
    for folder in manifests.folders(files):
        assert lint(files, folder) == [], folder


def test_the_command_prints_faults_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(manifests.files("small"), tmp_path)
    overlay = str(tmp_path / "kubernetes" / "overlays" / "fixed")
    assert main([overlay, str(tmp_path / "istio")]) == 0
    assert capsys.readouterr().out == ""
    service = tmp_path / "kubernetes" / "base" / "service.yaml"
    service.write_text(service.read_text().replace("targetPort: http1", "targetPort: grpc"))
    assert main([overlay]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Service fovea: targetPort 'grpc' is not a port of Deployment fovea-tiny"
    ]
    assert main([]) == 2
