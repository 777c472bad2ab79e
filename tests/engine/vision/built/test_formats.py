"""Formats of built encoders: errors for missing packages, compilers or devices, and TensorRT's calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.vision.built.formats import format_named
from fovea.engine.vision.built.manifest import FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_every_format_of_the_manifest_is_there() -> None:
    for name, facts in FORMATS.items():
        format = format_named(name)
        assert format.suffix.startswith(".")
        assert set(facts.exact) <= set(format.packages)


@pytest.mark.parametrize(
    ("format", "package", "device", "message"),
    [
        ("onnx", "onnx", CPU, "onnx is not installed; pip install onnx"),
        ("onnx", "onnxscript", CPU, "onnxscript is not installed; pip install onnxscript"),
        ("tensorrt", "tensorrt", CPU, "tensorrt is not installed; pip install tensorrt"),
        ("tensorrt", "tensorrt", CUDA, "tensorrt is not installed; pip install tensorrt"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, format: str, package: str, device: torch.device, message: str
) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime", "tensorrt"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        format_named(format).check(device)


def test_a_device_that_a_format_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensorrt runs only on CUDA, the device is cpu"):
        format_named("tensorrt").check(CPU)
    with pytest.raises(ConfigError, match="onnx runs only on CPUs here, the device is cuda"):
        format_named("onnx").check(CUDA)
    monkeypatch.setattr("fovea.engine.vision.built.formats.compiler", list)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        format_named("aot").check(CPU)
    format_named("aot").check(CUDA)


class _Flags:
    STRONGLY_TYPED = 3


def _tensorrt(*, parses: bool = True, builds: bytes | None = b"engine") -> Any:
    """A fake of the TensorRT module that has what a build calls. `calls` records the arguments."""
    calls: list[Any] = []

    class Builder:
        def __init__(self, logger: object) -> None:
            """The builder requires a logger."""

        def create_network(self, flags: int) -> str:
            calls.append(flags)
            return "network"

        def create_builder_config(self) -> str:
            return "config"

        def build_serialized_network(self, network: str, config: str) -> bytes | None:
            calls.append((network, config))
            return builds

    class OnnxParser:
        num_errors = 1

        def __init__(self, network: str, logger: object) -> None:
            """The parser would fill the network."""

        def parse_from_file(self, path: str) -> bool:
            calls.append(Path(path).read_bytes())
            return parses

        def get_error(self, index: int) -> str:
            return f"no such operator {index}"

    class Logger:
        WARNING = 1

        def __init__(self, level: int) -> None:
            """The level is WARNING."""

    return SimpleNamespace(
        Builder=Builder,
        OnnxParser=OnnxParser,
        Logger=Logger,
        NetworkDefinitionCreationFlag=_Flags,
        calls=calls,
    )


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fovea.engine.vision.built.formats.export", lambda segment, x, path: path.write_bytes(b"graph")
    )


def test_tensorrt_builds_from_the_graph(graph: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = _tensorrt()
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    format_named("tensorrt").build(nn.Identity(), torch.zeros(1), tmp_path / "segment.engine")
    assert (tmp_path / "segment.engine").read_bytes() == b"engine"
    assert trt.calls == [1 << 3, b"graph", ("network", "config")]


@pytest.mark.parametrize(
    ("trt", "message"),
    [(_tensorrt(parses=False), "no such operator 0"), (_tensorrt(builds=None), "TensorRT built no engine")],
)
def test_a_failed_tensorrt_build_says_why(
    graph: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trt: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    with pytest.raises(EngineError, match=message):
        format_named("tensorrt").build(nn.Identity(), torch.zeros(1), tmp_path / "segment.engine")
    assert not list(tmp_path.iterdir())
