"""The format "tensorrt": engines that TensorRT builds from ONNX graphs in the model's own type.

An engine holds its weights and runs only on the GPU and with the TensorRT release that built it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError, EngineError
from fovea.engine.vision.built.format import RunSegment, require_package
from fovea.engine.vision.built.onnx import export


class TensorRt:
    """The format "tensorrt"; see `Format`."""

    suffix = ".engine"
    packages = ("torch", "onnx", "onnxscript", "tensorrt")
    shares_weights = False

    def check(self, device: torch.device) -> None:
        require_package("tensorrt")
        if device.type != "cuda":
            raise ConfigError(f"tensorrt runs only on CUDA, the device is {device}", param="format")
        for package in ("onnx", "onnxscript"):
            require_package(package)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        """Build an engine. Raises EngineError with TensorRT's own message if its parser rejects the graph."""
        import tensorrt as trt

        logger = trt.Logger(trt.Logger.WARNING)
        builder = trt.Builder(logger)
        # Strongly typed: the engine computes in the types of the graph, which are the model's.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        with tempfile.TemporaryDirectory() as scratch:
            graph = Path(scratch) / "segment.onnx"
            export(segment, x, graph)
            if not parser.parse_from_file(str(graph)):
                errors = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
                raise EngineError(f"TensorRT rejects the encoder's graph: {errors}")
            plan = builder.build_serialized_network(network, builder.create_builder_config())
        if plan is None:
            raise EngineError("TensorRT built no engine; its log says why")
        path.write_bytes(bytes(plan))

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        require_package("tensorrt")
        import tensorrt as trt

        engine: Any = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(f"{path} is not an engine for this TensorRT release and GPU")
        context: Any = engine.create_execution_context()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        # The only input comes first.
        names.sort(key=lambda name: engine.get_tensor_mode(name) != trt.TensorIOMode.INPUT)

        def run(x: Tensor) -> tuple[Tensor, ...]:
            x = x.contiguous()
            out = [x.new_empty(tuple(engine.get_tensor_shape(name))) for name in names[1:]]
            for name, tensor in zip(names, (x, *out), strict=True):
                context.set_tensor_address(name, tensor.data_ptr())
            context.execute_async_v3(torch.cuda.current_stream(x.device).cuda_stream)
            return tuple(out)

        return run


FORMAT = TensorRt()
