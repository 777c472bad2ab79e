import pytest

from fovea.core.errors import ConfigError
from fovea.deploy.gpus import MIG_PROFILES, mig_fits, mig_resource, most_instances


@pytest.mark.parametrize(
    ("gpu", "profiles", "fit"),
    [
        ("A100-40GB", ["3g.20gb"] * 2, True),
        ("A100-40GB", ["3g.20gb"] * 3, False),  # `nvidia-smi mig -cgi 9,9,9`
        ("A100-40GB", ["2g.10gb"] * 3, True),
        ("A100-40GB", ["2g.10gb"] * 3 + ["1g.5gb"], True),
        ("A100-40GB", ["2g.10gb"] * 4, False),
        ("A100-40GB", ["4g.20gb", "2g.10gb", "1g.5gb"], True),
        ("A100-40GB", ["3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"], True),
        ("A100-40GB", ["4g.20gb", "4g.20gb"], False),
        ("A100-40GB", ["1g.5gb"] * 7, True),
        ("A100-40GB", ["1g.5gb"] * 8, False),
        ("A100-40GB", ["7g.40gb", "1g.5gb"], False),
        ("A100-40GB", ["1g.5gb+me"] * 2, False),
        ("A100-80GB", ["3g.40gb", "3g.40gb"], True),
        ("A100-80GB", ["1g.20gb"] * 4, True),
        ("H100-80GB", ["1g.10gb+me"] + ["1g.10gb"] * 6, True),
        ("A30", ["2g.12gb", "1g.6gb", "1g.6gb"], True),
        ("A30", ["4g.24gb", "1g.6gb"], False),
    ],
)
def test_layouts_of_nvidias_guide(gpu: str, profiles: list[str], fit: bool) -> None:
    assert mig_fits(gpu, profiles) is fit


def test_most_instances_of_a_profile() -> None:
    """Numbers of the column `Number of Instances` of the guide's tables."""
    assert {name: most_instances("A100-40GB", name) for name in MIG_PROFILES["A100-40GB"]} == {
        "1g.5gb": 7, "1g.5gb+me": 1, "1g.10gb": 4, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1, "7g.40gb": 1,
    }  # fmt: skip
    assert {name: most_instances("A30", name) for name in ("1g.6gb", "2g.12gb", "4g.24gb")} == {
        "1g.6gb": 4, "2g.12gb": 2, "4g.24gb": 1,
    }  # fmt: skip


def test_every_known_profile_has_places_and_a_resource() -> None:
    for gpu, profiles in MIG_PROFILES.items():
        for profile in profiles:
            assert most_instances(gpu, profile) >= 1
            assert "+" not in mig_resource(profile)
    with pytest.raises(ConfigError, match="profiles of T4: none, it has no MIG"):
        most_instances("T4", "1g.5gb")
