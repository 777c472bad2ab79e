"""ONNX, run by onnxruntime on CPUs, in float32: the files hold their weights and run wherever onnxruntime does."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError
from fovea.engine.vision.built.format import RunPart, need

OPSET = 20
EXTRA = "'fovea[onnx]'"


class Onnx:
    suffix = ".onnx"
    packages = ("torch", "onnx", "onnxscript", "onnxruntime")
    shares_weights = False

    def check(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"onnx runs on CPUs here, the device is {device}; accepted there: aot, tensorrt",
                param="format",
            )
        for package in ("onnx", "onnxscript", "onnxruntime"):
            need(package, EXTRA)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Of smaller types onnxruntime has no kernels on CPUs."""
        return torch.float32

    def build(self, part: nn.Module, x: Tensor, path: Path) -> None:
        import onnx

        export(part, x, path)
        onnx.checker.check_model(str(path))

    def load(self, path: Path, part: nn.Module) -> RunPart:
        need("onnxruntime", EXTRA)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            made = session.run(None, {given.name: x.float().contiguous().numpy()})
            return tuple(torch.from_numpy(array) for array in made)

        return run


def export(part: nn.Module, x: Tensor, path: Path) -> None:
    """Write an ONNX graph with its weights inside."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it tells which operators of other packages it does not know
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the exporter, about its own code
            torch.onnx.export(
                part, (x,), str(path), dynamo=True, external_data=False, opset_version=OPSET, verbose=False
            )
    finally:
        exporter.setLevel(level)


FORMAT = Onnx()
