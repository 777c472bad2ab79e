"""Triton's Python model `fovea_generate`: Fovea's engine inside of Triton. Rendered as `model.py`.

The engine batches by itself, step by step, so Triton passes every request on at once and the answers arrive
in any order: the model is decoupled. A request names one of `text_input`, `question` and `messages`. Images
come as files or URLs in `image`, or as decoded pixels of `fovea_preprocess`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import threading
import uuid
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from fovea import Engine
from fovea.api.convert import chat_prompt, image_references, sampling, video_references, wire_names
from fovea.api.explain import explained, fields_of
from fovea.api.schema import ChatRequest, CompletionRequest
from fovea.api.unknown import ignored_fields
from fovea.core.errors import FoveaError, InvalidRequest
from fovea.core.media import Image, Payload
from fovea.core.settings import build_settings
from fovea.core.types import AnswerBuilder, Delta, GenerationRequest, ImagePart, Prompt, TextPrompt
from fovea.media.image.decode import from_array
from fovea.media.limits import MediaLimits
from fovea.media.load import MediaLoader
from fovea.media.sandbox.decoder import SandboxedDecoder

T = TypeVar("T", ChatRequest, CompletionRequest)
log = logging.getLogger("fovea.triton")
PROMPTS = ("text_input", "question", "messages")
FLAGS = {
    "stream": False,
    "exclude_input_in_output": True,
    "return_finish_reason": False,
    "return_logprobs": False,
    "return_num_input_tokens": False,
    "return_num_output_tokens": False,
}
"""Inputs of one truth value, with the value of an input that is left out."""
SCHEMES = (b"data:", b"http://", b"https://", b"file://")
PIXELS = "data:image/x-fovea-rgb,"
"""Stands in the message for the image of the input `pixels`. It is never fetched."""
USUAL_TOKENS = 16
"""Longest answer to `text_input` without max_tokens: that of the completions API."""
CANCEL_POLL_S = 0.1
"""Seconds between two looks at whether the client has cancelled: Triton tells it only when it is asked."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one request, copied out of Triton's memory.

    texts: `text_input`, `question`, `messages` and `sampling_parameters`, as far as they were given.
    images: files or URLs. pixels: [height, width, 3], or None.
    flags: the inputs of FLAGS.
    """

    texts: dict[str, str]
    images: list[bytes]
    pixels: Any
    flags: dict[str, bool]


class Channel:
    """The way back to a client. After the last response, Triton has freed what its own sender refers to, and
    a call of it would end the process.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._ended = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has cancelled a request that is not answered yet."""
        return not self._ended and bool(self._sender.is_cancelled())

    def send(self, response: Any, *, last: bool) -> None:
        """Send a response, unless the last one was sent."""
        if not self._ended:
            self._ended = last
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def send_error(self, error: FoveaError) -> None:
        """End with an error of Fovea, under the code of Triton that says the same."""
        code = {408: "CANCELLED", 429: "UNAVAILABLE", 503: "UNAVAILABLE", 500: "INTERNAL"}.get(error.status)
        self.fail(f"{error.code}: {error.message}", code or "INVALID_ARG")

    def fail(self, message: str, code: str) -> None:
        """End with an error."""
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self.send(pb_utils.InferenceResponse(output_tensors=[], error=error), last=True)


class TritonPythonModel:
    """The model as Triton calls it: initialize, execute with the requests of each moment, finalize."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the checkpoint. An error here makes the model unavailable, with the error as its reason."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = json.loads(parameters["fovea"]["string_value"])
        limits = build_settings(MediaLimits, settings["media"])
        self._timeout = float(settings["timeout_s"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fovea-triton", daemon=True)
        self._thread.start()
        self._engine = Engine.from_pretrained(settings["model"], **settings["engine"])
        self._decoder = SandboxedDecoder(limits)
        self._media = MediaLoader(limits, decoder=self._decoder)
        self._running: set[asyncio.Task[None]] = set()

    def execute(self, requests: list[Any]) -> None:
        """Begin to answer requests. Answers are sent later, through each request's sender."""
        for request in requests:
            channel = Channel(request.get_response_sender())
            try:
                inputs = read_inputs(request)
            except FoveaError as error:
                channel.send_error(error)
                continue
            self._loop.call_soon_threadsafe(self._begin, inputs, channel)

    def finalize(self) -> None:
        """End the running requests with errors, and stop the engine."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._engine.shutdown()

    def _begin(self, inputs: Inputs, channel: Channel) -> None:
        task = self._loop.create_task(self._answer(inputs, channel))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._media.aclose()
        self._decoder.close()

    async def _answer(self, inputs: Inputs, channel: Channel) -> None:
        """Answer one request, and always send a last response: a client waits for it."""
        work = asyncio.ensure_future(self._generate(inputs, channel))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=CANCEL_POLL_S)
                if channel.is_cancelled:
                    work.cancel()
            await work
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            channel.fail("the request was cancelled", "CANCELLED")
        except FoveaError as error:
            channel.send_error(error)
        except Exception as error:  # Triton would leave the client without an answer
            log.error("a request failed", exc_info=error)
            channel.fail("the model has a defect; its log has the details", "INTERNAL")

    async def _generate(self, inputs: Inputs, channel: Channel) -> None:
        body = body_of(inputs)
        with wire_names(body):
            prompt = await self._prompt(body, inputs)
            chat = isinstance(body, ChatRequest)
            request = GenerationRequest(
                id=uuid.uuid4().hex,
                prompt=prompt,
                sampling=sampling(body, self._engine.info.default_sampling),
                cache_salt=body.cache_salt or "",
                timeout=body.timeout or self._timeout,
                kv_keep=body.kv_keep,
                prediction=body.prediction.text if isinstance(body, ChatRequest) and body.prediction else "",
                speculate=body.speculate is not False,
                priority=body.priority or 0,
                usual_tokens=None if chat else USUAL_TOKENS,
            )
            writer = Writer(channel, inputs)
            stream = self._engine.stream(request)
            try:
                async for delta in stream:
                    writer.add(delta)
            finally:
                await stream.aclose()  # type: ignore[attr-defined]
                self._media.release(prompt)

    async def _prompt(self, body: ChatRequest | CompletionRequest, inputs: Inputs) -> Prompt:
        """Load the images and videos, and build the prompt."""
        if isinstance(body, CompletionRequest):
            images = list(await self._media.load_all([url_of(image) for image in inputs.images]))
            if inputs.pixels is not None:
                images.append(from_array(inputs.pixels, self._media.limits))
            return TextPrompt(inputs.texts["text_input"], tuple(ImagePart(image) for image in images))
        urls = [reference.url for reference in image_references(body.messages)]
        loaded = iter(await self._media.load_all([url for url in urls if url != PIXELS]))
        decoded: list[Image] = []
        for url in urls:
            pixels = url == PIXELS
            decoded.append(from_array(inputs.pixels, self._media.limits) if pixels else next(loaded))
        clips = await self._media.open_videos([ref.url for ref in video_references(body.messages)])
        return chat_prompt(body, decoded, clips.videos)


class Writer:
    """Sends an answer: piece by piece with the input `stream`, otherwise as one response."""

    def __init__(self, channel: Channel, inputs: Inputs) -> None:
        self._channel = channel
        self._flags = inputs.flags
        self._whole = AnswerBuilder(1)
        self._tokens = 0
        echo = not self._flags["exclude_input_in_output"]
        self._before = inputs.texts.get("text_input", "") if echo else ""

    def add(self, delta: Delta) -> None:
        """Send a delta, or keep it for the one response. The last one has the usage."""
        last = delta.usage is not None
        self._tokens += len(delta.token_ids)
        if not self._flags["stream"]:
            self._whole.add(delta)
            if last:
                answer = self._whole.build()
                self._send(answer.text, delta.prompt_tokens, answer.finish_reasons[0], last=True)
        elif delta.text or delta.finish_reason or last:
            self._send(delta.text, delta.prompt_tokens, delta.finish_reason, last=last)

    def _send(self, text: str, prompt_tokens: int, reason: str | None, *, last: bool) -> None:
        outputs = [text_tensor("text_output", self._before + text)]
        self._before = ""
        if self._flags["return_finish_reason"]:
            outputs.append(text_tensor("finish_reason", reason or ""))
        if self._flags["return_num_input_tokens"]:
            outputs.append(pb_utils.Tensor("num_input_tokens", np.array([prompt_tokens], np.uint32)))
        if self._flags["return_num_output_tokens"]:
            outputs.append(pb_utils.Tensor("num_output_tokens", np.array([self._tokens], np.uint32)))
        self._tokens = 0
        self._channel.send(pb_utils.InferenceResponse(output_tensors=outputs), last=last)


def read_inputs(request: Any) -> Inputs:
    """Copy the inputs of a request. Raises InvalidRequest for texts that are not UTF-8."""

    def array(name: str) -> Any:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()

    texts = {}
    for name in (*PROMPTS, "sampling_parameters"):
        if (value := array(name)) is not None:
            try:
                texts[name] = bytes(value.reshape(-1)[0]).decode()
            except UnicodeDecodeError:
                raise InvalidRequest(f"{name} is not UTF-8", param=name) from None
    images, pixels = array("image"), array("pixels")
    flags = {name: bool(default if (value := array(name)) is None else value.reshape(-1)[0])
             for name, default in FLAGS.items()}  # fmt: skip
    return Inputs(
        texts,
        [] if images is None else [bytes(image) for image in images.reshape(-1)],
        None if pixels is None else pixels.copy(),
        flags,
    )


def body_of(inputs: Inputs) -> ChatRequest | CompletionRequest:
    """Return the request in the form of the OpenAI API. Raises InvalidRequest that names the input."""
    given = [name for name in PROMPTS if inputs.texts.get(name)]
    if len(given) != 1:
        raise InvalidRequest(
            f"inputs {', '.join(given) or 'without a prompt'}; accepted: one of {', '.join(PROMPTS)}",
            param="text_input",
        )
    if inputs.flags["return_logprobs"]:
        raise InvalidRequest("return_logprobs is not supported", param="return_logprobs")
    values = json_of(inputs, "sampling_parameters", dict) if "sampling_parameters" in inputs.texts else {}
    if values.get("n") not in (None, 1):
        raise InvalidRequest(f"n is {values['n']!r}; accepted: 1", param="n")
    if given == ["text_input"]:
        return validated(CompletionRequest, {**values, "prompt": inputs.texts["text_input"]})
    if given == ["question"]:
        urls = [url_of(image) for image in inputs.images] + ([PIXELS] if inputs.pixels is not None else [])
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        parts.append({"type": "text", "text": inputs.texts["question"]})
        return validated(ChatRequest, {**values, "messages": [{"role": "user", "content": parts}]})
    if inputs.images or inputs.pixels is not None:
        raise InvalidRequest("with messages, images are parts of type image_url", param="image")
    return validated(ChatRequest, {**values, "messages": json_of(inputs, "messages", list)})


def validated(model: type[T], values: dict[str, Any]) -> T:
    """Return the validated body. Raises InvalidRequest for a wrong or unknown field."""
    with explained():
        body = model.model_validate(values, extra="allow")
    ignored_fields(body, fields_of(model), strict=True)
    return body


def json_of(inputs: Inputs, name: str, kind: type[Any]) -> Any:
    """Return the JSON value of an input. Raises InvalidRequest."""
    noun = "an object" if kind is dict else "a list"
    try:
        value = json.loads(inputs.texts[name])
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is not JSON; accepted: {noun}", param=name) from None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is not the JSON of {noun}", param=name)
    return value


def url_of(image: bytes) -> str | Payload:
    """Return a URL as it is, a file in Base64 or as it is as a data: URL."""
    if image.startswith(SCHEMES[1:]):
        return image.decode(errors="replace")
    if image.startswith(SCHEMES[0]):
        return Payload(image)
    try:  # JSON has no bytes, so clients of Triton's generate endpoint send Base64
        base64.b64decode(image, validate=True)
        encoded = image
    except binascii.Error:
        encoded = base64.b64encode(image)
    return Payload(b"data:image/any;base64," + encoded)


def text_tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode(errors="replace")], dtype=np.object_))
