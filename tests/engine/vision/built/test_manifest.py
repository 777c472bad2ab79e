"""The manifest of built encoders: reading, writing, and every reason why an encoder does not fit."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fovea.engine.vision.built.engines import _replacing
from fovea.engine.vision.built.manifest import NAME, BuiltGrid, Manifest, Site, UnusableEngine, checksum

HERE = Site("a" * 40, "float32", "cpu", ("avx2", "avx512f", "fma"), {"torch": "2.13.0", "onnx": "1.0"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("first.pt2", "later.pt2"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    grids = (
        BuiltGrid((1, 4, 6), ("84x56 high", "90x60 high"), ("first.pt2", "later.pt2", "later.pt2"), 1e-6),
    )
    sums = {name: checksum(folder / name) for name in ("first.pt2", "later.pt2")}
    manifest = Manifest("aot", "float32", 2, HERE, grids, sums)
    manifest.write(folder)
    return manifest


def test_a_written_manifest_reads_back_equal(folder: Path, manifest: Manifest) -> None:
    assert Manifest.read(folder) == manifest
    assert manifest.misfit(HERE) is None
    manifest.check(folder, manifest.grids[0])
    assert sorted(path.name for path in folder.iterdir()) == ["first.pt2", "later.pt2", NAME]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": "b" * 40}, "built for model aaaa"),
        ({"dtype": "bfloat16"}, "built for dtype float32, this one is bfloat16"),
        ({"device": "cuda"}, "built for device cpu"),
        ({"versions": {"torch": "2.14.0"}}, "built with torch 2.13.0, here is 2.14.0"),
        ({"versions": {}}, "here is none"),
        ({"capability": ("avx2", "fma")}, "a processor with avx512f, which"),
    ],
)
def test_why_it_does_not_fit(manifest: Manifest, changed: dict[str, Any], reason: str) -> None:
    assert reason in str(manifest.misfit(replace(HERE, **changed)))


def test_more_instructions_and_other_packages_fit(manifest: Manifest) -> None:
    richer = replace(
        HERE, capability=(*HERE.capability, "amx_bf16"), versions={"torch": "2.13.0", "onnx": "9"}
    )
    assert manifest.misfit(richer) is None


def test_onnx_graphs_fit_any_processor(manifest: Manifest) -> None:
    """ONNX files hold no machine code, and any version of onnxruntime may run them."""
    graphs = replace(manifest, format="onnx")
    assert graphs.misfit(replace(HERE, capability=(), versions={})) is None


def test_a_changed_or_missing_file(folder: Path, manifest: Manifest) -> None:
    (folder / "later.pt2").write_bytes(b"something else")
    with pytest.raises(UnusableEngine, match=r"later\.pt2 is not the file that was built"):
        manifest.check(folder, manifest.grids[0])
    (folder / "first.pt2").unlink()
    with pytest.raises(UnusableEngine, match=r"first\.pt2 cannot be read"):
        manifest.check(folder, manifest.grids[0])


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v | {"version": 1}, "not of version 2"),
        (lambda v: [v], "not of version 2"),
        (lambda v: _without(v, "site"), "damaged: KeyError"),
        (lambda v: v | {"site": _without(v["site"], "dtype")}, "damaged: TypeError"),
        (lambda v: v | {"format": "exe"}, "format 'exe'"),
        (lambda v: v | {"grids": [v["grids"][0] | {"grid": [1, 0, 6]}]}, "grid"),
        (lambda v: v | {"grids": [v["grids"][0] | {"parts": ["../first.pt2"]}]}, "part '../first.pt2'"),
        (lambda v: v | {"checksums": {}}, "part "),
    ],
)
def test_a_damaged_manifest_is_an_error(folder: Path, manifest: Manifest, change: Any, message: str) -> None:
    values = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(change(values)))
    with pytest.raises(UnusableEngine, match=message):
        Manifest.read(folder)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UnusableEngine, match="cannot be read: No such file"):
        Manifest.read(tmp_path)
    (tmp_path / NAME).write_text("{")
    with pytest.raises(UnusableEngine, match="not JSON"):
        Manifest.read(tmp_path)


def test_the_digest_covers_what_decides_outputs(manifest: Manifest) -> None:
    """The digest is part of the disk cache's key: encoder outputs of other engines must not be reused."""
    others = [
        replace(manifest, precision="bfloat16"),
        replace(manifest, format="onnx"),
        replace(manifest, checksums=dict(manifest.checksums) | {"first.pt2": "0" * 64}),
    ]
    assert len({manifest.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize("name", ["", NAME, "later.pt2"])
def test_encoders_that_another_user_can_change_are_not_used(
    folder: Path, manifest: Manifest, name: str
) -> None:
    """They are machine code: whoever could write to the folder could run code in the server."""
    (folder / name).chmod(0o777)
    with pytest.raises(UnusableEngine, match="others may write to"):
        Manifest.read(folder).check(folder, manifest.grids[0])


@pytest.mark.parametrize("name", [NAME, "first.pt2"])
def test_links_in_the_place_of_encoders_are_not_followed(folder: Path, manifest: Manifest, name: str) -> None:
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")
    with pytest.raises(UnusableEngine, match="cannot be read"):
        Manifest.read(folder).check(folder, manifest.grids[0])


def test_a_build_is_the_users_own_whatever_the_umask(folder: Path, manifest: Manifest) -> None:
    """With a umask of 002, common on desktops, its own build would not be used."""
    before = os.umask(0)
    try:
        with _replacing(folder / "new"):
            manifest.write(folder / "new")
    finally:
        os.umask(before)
    assert Manifest.read(folder / "new") == manifest
    assert [(folder / "new" / name).stat().st_mode & 0o777 for name in ("", NAME)] == [0o755, 0o644]


def test_a_manifest_of_deep_lists_is_not_json(folder: Path) -> None:
    (folder / NAME).write_text("[" * 100_000)
    with pytest.raises(UnusableEngine, match="is not JSON"):
        Manifest.read(folder)
