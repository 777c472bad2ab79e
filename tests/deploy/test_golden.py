import pytest

from tests.deploy import golden


@pytest.mark.parametrize("spec", golden.SPECS)
@pytest.mark.parametrize("target", golden.names())
def test_a_target_renders_the_files_of_the_repository(target: str, spec: str) -> None:
    """If a change is wanted, `python -m tests.deploy.golden TARGET` writes the files anew; look at them."""
    rendered, kept = golden.rendered(target, spec), golden.kept(target, spec)
    assert sorted(rendered) == sorted(kept)
    for path, text in rendered.items():
        assert text == kept[path], path


def test_every_folder_of_the_repository_belongs_to_a_target() -> None:
    assert {path.name for path in golden.FOLDER.iterdir()} <= set(golden.names())
