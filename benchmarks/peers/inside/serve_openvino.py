"""Serve OpenVINO GenAI's continuous batching by the thin server, inside the venv of OpenVINO GenAI.

As in OpenVINO Model Server, the thread of a request reads and encodes its image and enqueues the request, and
one thread runs the steps.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image
from thin import parser, serve
from tokenizers import Tokenizer


class OpenVino:
    """A backend on `ContinuousBatchingPipeline`."""

    def __init__(self, model: Path, threads: int, kv_gb: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = kv_gb
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.pipe = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.numbers = itertools.count()
        self.running: dict[int, tuple[genai.GenerationHandle, queue.Queue[str | None]]] = {}
        self.arrived = threading.Condition()
        threading.Thread(target=self._step_forever, daemon=True).start()

    def answer(self, prompt: str, images: list[Image.Image], tokens: int) -> Generator[str]:
        config = genai.GenerationConfig(
            max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        number, texts = next(self.numbers), queue.Queue[str | None]()
        tensors = [ov.Tensor(np.asarray(image)[None]) for image in images]
        handle = self.pipe.add_request(number, prompt, tensors, config)
        with self.arrived:
            self.running[number] = handle, texts
            self.arrived.notify()
        try:
            yield from iter(texts.get, None)
        finally:
            handle.cancel()

    def _step_forever(self) -> None:
        while True:
            with self.arrived:
                self.arrived.wait_for(lambda: self.running)
                running = list(self.running.items())
            if self.pipe.has_non_finished_requests():
                self.pipe.step()
            for number, (handle, texts) in running:
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            texts.put(self.tokenizer.decode([token], skip_special_tokens=False))
                if handle.get_status() != genai.GenerationStatus.RUNNING and not handle.can_read():
                    texts.put(None)
                    with self.arrived:
                        del self.running[number]


if __name__ == "__main__":
    flags = parser()
    flags.add_argument("--kv-gb", type=int, required=True)
    args = flags.parse_args()
    serve(OpenVino(args.model, args.threads, args.kv_gb), args.model, args.port)
