"""The formats of built encoders: AOTInductor, ONNX and TensorRT. Their packages are imported on first use."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fovea.core.errors import ConfigError, EngineError
from fovea.kernels.choose import secure_torch_cache
from fovea.kernels.native.build import compiler

RunSegment = Callable[[Tensor], tuple[Tensor, ...]]
"""A segment as a function: from rows to rows and the DeepStack features of its blocks."""


class Format(Protocol):
    """A format of built encoders.

    suffix: suffix of its file names.
    packages: packages whose versions the manifest records.
    shares_weights: the files hold code alone and read the model's own plain weights, so that all segments of
        one shape share a file.
    """

    suffix: str
    packages: tuple[str, ...]
    shares_weights: bool

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if encoders of this format cannot be built or run on the device."""
        ...

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which this format computes a model of type `dtype`."""
        ...

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        """Build a segment for inputs of the shape, type and device of x, and write it to a file."""
        ...

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        """Load a built segment. segment: the module that was built; its weights are the model's."""
        ...


def require_package(package: str) -> None:
    """Raise ConfigError if a package is missing. The message says how to install it."""
    try:
        import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} is not installed; pip install {package}", param="format") from error


class _InputWeights(nn.Module):
    """A segment whose weights are inputs of `forward`, in the order of `weights`."""

    def __init__(self, segment: nn.Module) -> None:
        super().__init__()
        self.__dict__["segment"] = segment  # hidden from torch, which would export its weights

    def weights(self) -> dict[str, Tensor]:
        segment: nn.Module = self.__dict__["segment"]
        return dict(segment.named_parameters()) | dict(segment.named_buffers())

    def forward(self, x: Tensor, *weights: Tensor) -> Any:
        named = dict(zip(self.weights(), weights, strict=True))
        return torch.func.functional_call(self.__dict__["segment"], named, (x,))


class Aot:
    """The format "aot"; see `Format`.

    The model's own weights are inputs of the compiled code. So a file is two megabytes of code, all
    segments of one shape share it, and no weight is in memory twice.
    """

    suffix = ".pt2"
    packages: tuple[str, ...] = ("torch",)
    shares_weights = True

    def check(self, device: torch.device) -> None:
        if device.type == "cpu" and not compiler():
            raise ConfigError("aot needs a C++ compiler, and this machine has none", param="format")

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def build(self, segment: nn.Module, x: Tensor, path: Path) -> None:
        secure_torch_cache()
        bare = _InputWeights(segment)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
            program = torch.export.export(bare, (x, *bare.weights().values()), strict=False)
            # The code counts threads when it runs: the server may have another number of threads than the
            # build.
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={"cpp.dynamic_threads": True}
            )

    def load(self, path: Path, segment: nn.Module) -> RunSegment:
        # Detached tensors keep the plain weights alive when the layers drop them after packing.
        weights = [tensor.detach() for tensor in _InputWeights(segment).weights().values()]
        package: Any = torch._inductor.aoti_load_package(str(path))

        def run(x: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = package(x.contiguous(), *weights)
            return outputs

        return run


AOT = Aot()


OPSET = 20


class Onnx:
    """The format "onnx"; see `Format`.

    The files hold their weights and run on every machine that has onnxruntime.
    """

    suffix = ".onnx"
    packages: tuple[str, ...] = ("torch", "onnx", "onnxscript", "onnxruntime")
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


ONNX = Onnx()


class TensorRt:
    """The format "tensorrt"; see `Format`.

    An engine holds its weights and runs only on the GPU and with the TensorRT release that built it.
    """

    suffix = ".engine"
    packages: tuple[str, ...] = ("torch", "onnx", "onnxscript", "tensorrt")
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


TENSORRT = TensorRt()


def format_named(name: str) -> Format:
    """Return the format of that name, a key of `manifest.FORMATS`."""
    formats: dict[str, Format] = {"aot": AOT, "onnx": ONNX, "tensorrt": TENSORRT}
    return formats[name]
