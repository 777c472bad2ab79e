"""Scores an exported folder with Hugging Face's model, by greedy answers to held-out scenes of each kind.

    python training/score.py --count 200 [--kinds reading,counting] [--dtype float32]

Besides the kinds, it reports counting up to 5, and reading of 4 characters with a height of 20 pixels or
more.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common import ASSETS
from fovea.evaluation.scenes import HELD_OUT_SEED, KINDS, Sample, generate


class ReferenceModel:
    """Hugging Face's model of a folder, with its tokenizer and image processor."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def answer(self, messages: list[dict[str, object]], pixels: torch.Tensor, grid: torch.Tensor) -> str:
        """The greedy answer to a conversation with images. grid: (images, 3), in patches."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        pieces = text.split("<|image_pad|>")
        text = pieces[0]
        for (_, rows, columns), piece in zip(grid.tolist(), pieces[1:], strict=True):
            text += "<|image_pad|>" * (rows * columns // 4) + piece
        ids = torch.tensor([self.tokenizer.encode(text)])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            max_new_tokens=160,
        )
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def count_right(self, sample: Sample) -> tuple[int, int]:
        """Number of right turns, and of all turns. Later turns follow the right answers of earlier ones."""
        inputs = self.processor(images=list(sample.images), return_tensors="pt")
        messages: list[dict[str, object]] = []
        right = 0
        for number, turn in enumerate(sample.turns):
            images = [{"type": "image"}] * len(sample.images) if number == 0 else []
            content = [*images, {"type": "text", "text": turn.question}]
            messages.append({"role": "user", "content": content})
            answer = self.answer(messages, inputs["pixel_values"], inputs["image_grid_thw"])
            accepted = {normalize(text) for text in turn.accepted}
            right += normalize(answer) in accepted
            if normalize(answer) not in accepted and WRONG:
                print(
                    sample.id, sample.images[0].size, turn.question, "|", turn.answer, "|", answer, flush=True
                )
            messages.append({"role": "assistant", "content": turn.answer})
        return right, len(sample.turns)


WRONG: list[bool] = []
"""Not empty if wrong answers are to be printed."""


def normalize(text: str) -> str:
    """The text without outer white space, final full stops and capitals."""
    return text.strip().rstrip(".").lower()


def interval(right: int, total: int) -> str:
    """A share with its 95% interval (Wilson), as text."""
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return f"{share:.3f} [{middle - half:.3f}, {middle + half:.3f}] n={total}"


def labels(sample: Sample) -> list[str]:
    """The rows of the report that a sample counts for."""
    names = [sample.kind]
    if sample.facts.get("count", 9) <= 5:
        names.append("counting up to 5")
    if sample.facts.get("characters") == 4 and sample.facts["height"] >= 20:
        names.append("reading 4 characters of 20 px")
    side = max(sample.facts["width"], sample.facts["image_height"])
    bound = "up to 256" if side <= 271 else "up to 512" if side <= 527 else "above"
    names.append(f"{sample.kind}, longer side {bound}")
    return names


def select_samples(kind: str, seed: int, count: int, sizes: list[tuple[int, int]] | None) -> Iterator[Sample]:
    """`count` samples of a kind. Texts of the kind `reading4` have 4 characters of 20 pixels or more."""
    if kind != "reading4":
        return generate(seed, count, [kind], sizes)
    some = generate(seed + 1, 60 * count, ["reading"], sizes)
    return islice((s for s in some if s.facts["characters"] == 4 and s.facts["height"] >= 20), count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ASSETS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    parser.add_argument(
        "--side", type=int, default=0, help="side of all images in pixels; 0: sizes of each kind"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.wrong:
        WRONG.append(True)
    reference = ReferenceModel(options.folder, getattr(torch, options.dtype))
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    sizes = [(options.side, options.side)] if options.side else None
    for kind in options.kinds.split(","):
        for sample in select_samples(kind, options.seed, options.count, sizes):
            right, turns = reference.count_right(sample)
            for label in labels(sample):
                totals[label][0] += right
                totals[label][1] += turns
        print(
            json.dumps({k: interval(*v) for k, v in totals.items() if k.startswith(kind.rstrip("4"))}),
            flush=True,
        )


if __name__ == "__main__":
    main()
