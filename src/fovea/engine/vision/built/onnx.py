"""The format "onnx": ONNX graphs that onnxruntime runs on CPUs in float32.

The files hold their weights and run on every machine that has onnxruntime.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.vision.built.format import RunSegment, require_package

OPSET = 20


class Onnx:
    """The format "onnx"; see `Format`."""

    suffix = ".onnx"
    packages = ("torch", "onnx", "onnxscript", "onnxruntime")
    shares_weights = False

    def check(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"onnx runs only on CPUs here, the device is {device}; accepted for it: aot, tensorrt",
                param="format",
            )
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package(package)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Always float32: onnxruntime has no 16-bit CPU kernels."""
        return torch.float32

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        import onnx

        export(segment, x, path)
        onnx.checker.check_model(str(path))

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        require_package("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (graph_input,) = session.get_inputs()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            outputs = session.run(None, {graph_input.name: x.float().contiguous().numpy()})
            return tuple(torch.from_numpy(array) for array in outputs)

        return run


def export(segment: nn.Module, x: Tensor, path: Path) -> None:
    """Write a segment as an ONNX graph that holds its weights, for inputs of the shape and type of x."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it warns about operators of other packages that it does not know
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter warns about its own code
            torch.onnx.export(
                segment, (x,), str(path), dynamo=True, external_data=False, opset_version=OPSET, verbose=False
            )
    finally:
        exporter.setLevel(level)


FORMAT = Onnx()
