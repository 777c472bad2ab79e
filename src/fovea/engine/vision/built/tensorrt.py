"""TensorRT, from an ONNX graph of the model's own type: an engine of this GPU and this release, weights inside."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.vision.built.format import RunPart, need
from fovea.engine.vision.built.onnx import EXTRA, export


class TensorRt:
    suffix = ".engine"
    packages = ("torch", "onnx", "onnxscript", "tensorrt")
    shares_weights = False

    def check(self, device: torch.device) -> None:
        need("tensorrt", "tensorrt")
        if device.type != "cuda":
            raise ConfigError(f"tensorrt is for CUDA, the device is {device}", param="format")
        for package in ("onnx", "onnxscript"):
            need(package, EXTRA)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, part: nn.Module, x: Tensor, path: Path) -> None:
        """Raises EngineError with TensorRT's words where its parser does not take the graph."""
        import tensorrt as trt

        logger = trt.Logger(trt.Logger.WARNING)
        builder = trt.Builder(logger)
        # Strongly typed: it computes in the types of the graph, which are the model's.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        with tempfile.TemporaryDirectory() as scratch:
            graph = Path(scratch) / "part.onnx"
            export(part, x, graph)
            if not parser.parse_from_file(str(graph)):
                told = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
                raise EngineError(f"TensorRT does not take the encoder's graph: {told}")
            made = builder.build_serialized_network(network, builder.create_builder_config())
        if made is None:
            raise EngineError("TensorRT built nothing; its log says why")
        path.write_bytes(bytes(made))

    def load(self, path: Path, part: nn.Module) -> RunPart:
        need("tensorrt", "tensorrt")
        import tensorrt as trt

        engine: Any = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(f"{path} is no engine of this release and GPU")
        context: Any = engine.create_execution_context()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        given, *made = sorted(names, key=lambda name: engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT)

        def run(x: Tensor) -> tuple[Tensor, ...]:
            x = x.contiguous()
            out = [x.new_empty(tuple(engine.get_tensor_shape(name))) for name in made]
            for name, tensor in zip((given, *made), (x, *out), strict=True):
                context.set_tensor_address(name, tensor.data_ptr())
            context.execute_async_v3(torch.cuda.current_stream(x.device).cuda_stream)
            return tuple(out)

        return run


FORMAT = TensorRt()
