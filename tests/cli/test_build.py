"""fovea build: its files, its output, and the errors before anything is loaded."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor, nn

from fovea.engine.vision.built.formats import Onnx, RunSegment
from fovea.engine.vision.built.manifest import Manifest
from tests.cli.support import Caller
from tests.support.checkpoints import write


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.fixture
def a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a C++ compiler, for tests that end before it is called."""
    monkeypatch.setattr("fovea.engine.vision.built.formats.compiler", lambda: ["c++"])


@pytest.fixture(params=["stand-in", pytest.param("onnx", marks=pytest.mark.slow)])
def onnx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format "onnx", or a stand-in for it that exports nothing and runs the module itself."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if request.param == "onnx":
        return

    def build(self: Onnx, segment: nn.Module, x: Tensor, path: Path) -> None:
        path.write_text(str(tuple(x.shape)))

    def load(self: Onnx, path: Path, segment: nn.Module) -> RunSegment:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            assert path.read_text() == str(tuple(x.shape))
            return segment(x)  # type: ignore[no-any-return]

        return run

    monkeypatch.setattr(Onnx, "check", lambda self, device: None)
    monkeypatch.setattr(Onnx, "build", build)
    monkeypatch.setattr(Onnx, "load", load)


@pytest.mark.usefixtures("onnx")
def test_resolutions_and_levels_become_grids(fovea: Caller, tiny: Path, out: Path) -> None:
    outcome = fovea(
        "build", tiny, "--resolutions", "96x64", "100x60", "--levels", "low", "high", "--format", "onnx",
        "--blocks-per-part", 3, "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    manifest = Manifest.read(out)
    assert [grid.grid for grid in manifest.grids] == [(1, 4, 6)]
    assert manifest.grids[0].sources == ("96x64 low", "96x64 high", "100x60 low", "100x60 high")
    assert manifest.site.versions["onnxruntime"] != "none"
    assert (
        "4x6 patches (96x64 low, 96x64 high, 100x60 low, 100x60 high): 1 parts in 1 files, float32"
        in outcome.out
    )
    assert f"use them with --encoder-engines {out}" in outcome.out
    from PIL import Image

    Image.new("RGB", (96, 64), "red").save(out / "red.png")
    words = ("ask", out / "red.png", "what?", "--model", tiny, "--max-tokens", 4, "--temperature", 0)
    assert fovea(*words, "--encoder-engines", out).out == fovea(*words).out


@pytest.mark.usefixtures("a_compiler")
def test_an_architecture_without_static_encoders(fovea: Caller, tmp_path: Path, out: Path) -> None:
    outcome = fovea("build", write("llava", tmp_path / "llava"), "--out", out)
    assert outcome.code == 2
    assert "no encoders can be built for LLaVA-1.5; accepted: Qwen2-VL" in outcome.error_line
    assert not out.exists()


@pytest.mark.parametrize("text", ["448", "448x", "0x448", "448x448x3", "-1x2", "axb", "100000x5"])
def test_a_text_that_is_no_resolution(fovea: Caller, tiny: Path, text: str) -> None:
    outcome = fovea("build", tiny, f"--resolutions={text}")
    assert outcome.code == 2
    assert "is not WIDTHxHEIGHT" in outcome.err


@pytest.mark.usefixtures("a_compiler")
def test_a_resolution_that_the_processor_refuses(fovea: Caller, tiny: Path, out: Path) -> None:
    outcome = fovea("build", tiny, "--resolutions", "1x9999", "--out", out)
    assert outcome.code == 2
    assert "--resolutions 1x9999: " in outcome.error_line


def test_a_format_whose_package_is_missing(
    fovea: Caller, tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # type: ignore[arg-type]
    outcome = fovea("build", tiny, "--format", "tensorrt", "--out", out)
    assert outcome.code == 2
    assert "tensorrt is not installed; pip install tensorrt" in outcome.error_line


def test_a_folder_without_engines(fovea: Caller, tiny: Path, tmp_path: Path) -> None:
    outcome = fovea("ask", "what?", "--model", tiny, "--encoder-engines", tmp_path)
    assert outcome.code == 2
    assert "has no manifest.json; fovea build writes one" in outcome.error_line


def test_engines_of_another_model(fovea: Caller, tiny: Path, out: Path) -> None:
    """The mismatch is reported, and the eager encoder answers."""
    site = {"model": "0", "dtype": "float32", "device": "cpu", "capability": [], "versions": {}}
    out.mkdir()
    manifest = {
        "version": 1,
        "format": "aot",
        "precision": "float32",
        "blocks": 1,
        "site": site,
        "grids": [],
        "checksums": {},
    }
    (out / "manifest.json").write_text(json.dumps(manifest))
    words = ("ask", "what?", "--model", tiny, "--max-tokens", 4, "--temperature", 0, "--device", "cpu")
    outcome = fovea(*words, "--encoder-engines", out)
    assert outcome.code == 0
    assert outcome.out == fovea(*words).out
