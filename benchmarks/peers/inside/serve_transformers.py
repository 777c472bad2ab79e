"""Serve transformers' `generate` by the thin server, inside the venv of transformers.

Requests that wait at the same time become one padded batch. No request can join a running batch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers as hf
from PIL import Image
from thin import parser, serve
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MAX_BATCH, GATHER_S = 8, 0.02


@dataclass
class Waiting:
    """A request in the queue. texts: gets the text of each token, then None."""

    prompt: str
    images: list[Image.Image]
    tokens: int
    texts: queue.Queue[str | None] = field(default_factory=queue.Queue)


class Transformers:
    """A backend on `generate`, with one thread that runs batches."""

    def __init__(self, folder: Path, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        hf.logging.set_verbosity_error()
        self.model = hf.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.waiting: queue.Queue[Waiting] = queue.Queue()
        threading.Thread(target=self._run_forever, daemon=True).start()

    def answer(self, prompt: str, images: list[Image.Image], tokens: int) -> Generator[str]:
        request = Waiting(prompt, images, tokens)
        self.waiting.put(request)
        yield from iter(request.texts.get, None)

    def _run_forever(self) -> None:
        pending: list[Waiting] = []
        while True:
            pending = pending or [self.waiting.get()]
            time.sleep(GATHER_S)
            while not self.waiting.empty():
                pending.append(self.waiting.get())
            first = len(pending[0].images), pending[0].tokens
            batch = [request for request in pending if (len(request.images), request.tokens) == first]
            batch = batch[:MAX_BATCH]
            pending = [request for request in pending if request not in batch]
            self._generate(batch)
            for request in batch:
                request.texts.put(None)

    @torch.inference_mode()
    def _generate(self, batch: list[Waiting]) -> None:
        images = [image for request in batch for image in request.images]
        pixels = dict(self.processor(images=images, return_tensors="pt")) if images else {}
        counts = iter(_visual_tokens(pixels))
        prompts = [self._ids(request, counts) for request in batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens = batch[0].tokens
        self.model.generate(
            input_ids=ids, attention_mask=mask,
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            streamer=_Streamer(self.tokenizer, batch), **pixels,
        )  # fmt: skip

    def _ids(self, request: Waiting, counts: Iterator[int]) -> list[int]:
        """The token ids of a prompt, with one image token for each visual token."""
        ids: list[int] = []
        for token in self.tokenizer.encode(request.prompt).ids:
            ids += [token] * (next(counts) if token == self.model.config.image_token_id else 1)
        return ids


def _visual_tokens(pixels: dict[str, torch.Tensor]) -> list[int]:
    """The number of visual tokens of each image of a batch: four patches make one token."""
    return [int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", ())]


class _Streamer(hf.generation.streamers.BaseStreamer):
    """A streamer for a batch.

    `generate` gives it the prompts first, then one token per request in each step.
    """

    def __init__(self, tokenizer: Tokenizer, batch: list[Waiting]) -> None:
        self.tokenizer, self.batch, self.past_prompt = tokenizer, batch, False

    def put(self, value: torch.Tensor) -> None:
        if not self.past_prompt:
            self.past_prompt = True
            return
        for request, token in zip(self.batch, value.tolist(), strict=True):
            request.texts.put(self.tokenizer.decode([token], skip_special_tokens=False))

    def end(self) -> None:
        """Do nothing: no text is held back."""


if __name__ == "__main__":
    flags = parser()
    flags.add_argument("--dtype", default="bfloat16")
    args = flags.parse_args()
    serve(Transformers(args.model, args.threads, args.dtype), args.model, args.port)
