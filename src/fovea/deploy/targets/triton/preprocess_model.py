"""Triton's Python model `fovea_preprocess`: from an image's file or URL to pixels. Rendered as `model.py`.

It downloads, checks and decodes images in processes of their own, so that a wrong file never reaches the
process of the engine, and so that this work can have more processes than there are engines.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from fovea.core.errors import FoveaError
from fovea.core.media import Payload
from fovea.core.settings import build_settings
from fovea.media.limits import MediaLimits
from fovea.media.load import MediaLoader
from fovea.media.sandbox.decoder import SandboxedDecoder

SCHEMES = (b"data:", b"http://", b"https://", b"file://")


class TritonPythonModel:
    """The model as Triton calls it: one image in, its pixels out."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the event loop that waits for downloads and decoders."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = json.loads(parameters["fovea"]["string_value"])
        limits = build_settings(MediaLimits, settings["media"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fovea-triton", daemon=True)
        self._thread.start()
        self._decoder = SandboxedDecoder(limits)
        self._media = MediaLoader(limits, decoder=self._decoder)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the responses in the order of the requests."""
        work = asyncio.run_coroutine_threadsafe(self._decode_all(requests), self._loop)
        return work.result()

    def finalize(self) -> None:
        """Stop the decoders."""
        asyncio.run_coroutine_threadsafe(self._media.aclose(), self._loop).result()
        self._decoder.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _decode_all(self, requests: list[Any]) -> list[Any]:
        return list(await asyncio.gather(*map(self._decode, requests)))

    async def _decode(self, request: Any) -> Any:
        image = bytes(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().reshape(-1)[0])
        try:
            (loaded,) = await self._media.load_all([url_of(image)])
            try:
                rgb = await self._loop.run_in_executor(None, lambda: loaded.rgb)
            finally:
                self._media.budget.release(loaded.pixels)
        except FoveaError as error:
            wrong = pb_utils.TritonError(f"{error.code}: {error.message}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(output_tensors=[], error=wrong)
        pixels = np.frombuffer(rgb, np.uint8).reshape(loaded.height, loaded.width, 3)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("pixels", pixels)])


def url_of(image: bytes) -> str | Payload:
    """Return a URL as it is, and a file as a data: URL."""
    if image.startswith(SCHEMES[1:]):
        return image.decode(errors="replace")
    return Payload(image if image.startswith(SCHEMES[0]) else data_url(image))


def data_url(image: bytes) -> bytes:
    """Return a file, as it is or in Base64, as a data: URL. JSON has no bytes, so clients send Base64."""
    try:
        base64.b64decode(image, validate=True)
        return b"data:image/any;base64," + image
    except ValueError:
        return b"data:image/any;base64," + base64.b64encode(image)
