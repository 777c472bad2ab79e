import pytest
import yaml

from fovea.deploy.target import render
from tests.deploy import golden


@pytest.mark.parametrize("spec", golden.SPECS)
@pytest.mark.parametrize("target", golden.names())
def test_a_target_renders_the_files_of_the_repository(target: str, spec: str) -> None:
    """If a change is wanted, `python -m tests.deploy.golden` writes them again; look at the difference."""
    rendered, kept = golden.rendered(target, spec), golden.kept(target, spec)
    assert sorted(rendered) == sorted(kept)
    for path, text in rendered.items():
        assert text == kept[path], path


def test_every_folder_of_the_repository_belongs_to_a_target() -> None:
    assert {path.name for path in golden.FOLDER.iterdir()} <= set(golden.names())


def test_the_operator_gets_the_rules_that_prometheus_gets() -> None:
    own = yaml.safe_load(render(golden.SPECS["full"], ["kubernetes"])[golden.RULES])
    assert (own["kind"], own["metadata"]["name"]) == ("PrometheusRule", "vlm-rules")
    folder = golden.SOURCES / "monitoring" / "rules"
    files = [yaml.safe_load((folder / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    assert own["spec"]["groups"] == [group for file in files for group in file["groups"]]
