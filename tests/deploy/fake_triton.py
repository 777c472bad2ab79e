"""A small stand-in for `triton_python_backend_utils`, the module that Triton gives to Python models.

It has what Fovea's models use, with the rules that Triton enforces: nothing is sent after the last response,
and every tensor has the type of its configuration.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FINAL = 1


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    def text(self, name: str = "text_output") -> str:
        return bytes(self.outputs[name][0]).decode()


class Sender:
    """Receives the responses to one request.

    cancelled: whether the client has cancelled.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = False
        self._sent: queue.Queue[InferenceResponse | None] = queue.Queue()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.ended, "a response after the last one"
        self.ended = flags == FINAL
        if response is not None:
            self._sent.put(response)
        if self.ended:
            self._sent.put(None)

    def is_cancelled(self) -> bool:
        assert not self.ended, "Triton 2.51 crashes here"
        return self.cancelled

    def next(self, timeout_s: float = 60.0) -> InferenceResponse | None:
        """Wait for the next response; None after the last one."""
        return self._sent.get(timeout=timeout_s)

    def all(self) -> list[InferenceResponse]:
        responses = []
        while (response := self.next()) is not None:
            responses.append(response)
        return responses


class Request:
    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.inputs = {name: Tensor(name, _array(value)) for name, value in inputs.items()}
        self.sender = Sender()

    def get_response_sender(self) -> Sender:
        return self.sender


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool):
        return np.array([value])
    values = value if isinstance(value, list) else [value]
    return np.array([each.encode() if isinstance(each, str) else each for each in values], dtype=np.object_)


def load(path: Path, config: str, patch: pytest.MonkeyPatch) -> Any:
    """Import a rendered model.py with this stand-in, and initialize its model.

    config: the text of its config.pbtxt; only the parameter `fovea` is read.
    """
    module = ModuleType("triton_python_backend_utils")
    for name, value in {
        "Tensor": Tensor,
        "InferenceResponse": InferenceResponse,
        "TritonError": TritonError,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
        "get_input_tensor_by_name": lambda request, name: request.inputs.get(name),
        "Logger": SimpleNamespace(log_error=print),
    }.items():
        setattr(module, name, value)
    patch.setitem(sys.modules, "triton_python_backend_utils", module)
    spec = importlib.util.spec_from_file_location(f"rendered_{path.parts[-3]}", path)
    assert spec is not None
    assert spec.loader is not None
    rendered = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, rendered)
    spec.loader.exec_module(rendered)
    value = json.loads(config.partition("string_value: ")[2].splitlines()[0].removesuffix(" }"))
    model = rendered.TritonPythonModel()
    model.initialize({"model_config": json.dumps({"parameters": {"fovea": {"string_value": value}}})})
    return model
