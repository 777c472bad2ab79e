"""Scores an exported folder with Hugging Face's model: greedy answers to held-out scenes, per kind.

    python training/score.py --count 200 [--kinds reading,counting] [--dtype float32]

Besides the kinds it reports counting up to 5, and reading 4 characters of 20 pixels or more.
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


class Judge:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def answer(self, messages: list[dict[str, object]], pixels: torch.Tensor, grid: torch.Tensor) -> str:
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

    def right(self, sample: Sample) -> tuple[int, int]:
        """(right turns, turns); later turns see the right earlier answers."""
        made = self.processor(images=list(sample.images), return_tensors="pt")
        messages: list[dict[str, object]] = []
        right = 0
        for number, turn in enumerate(sample.turns):
            images = [{"type": "image"}] * len(sample.images) if number == 0 else []
            content = [*images, {"type": "text", "text": turn.question}]
            messages.append({"role": "user", "content": content})
            said = self.answer(messages, made["pixel_values"], made["image_grid_thw"])
            accepted = {normal(answer) for answer in turn.accepted}
            right += normal(said) in accepted
            if normal(said) not in accepted and WRONG:
                print(
                    sample.id, sample.images[0].size, turn.question, "|", turn.answer, "|", said, flush=True
                )
            messages.append({"role": "assistant", "content": turn.answer})
        return right, len(sample.turns)


WRONG: list[bool] = []


def normal(text: str) -> str:
    return text.strip().rstrip(".").lower()


def interval(right: int, total: int) -> str:
    """Wilson, 95%."""
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return f"{share:.3f} [{middle - half:.3f}, {middle + half:.3f}] n={total}"


def labels(sample: Sample) -> list[str]:
    names = [sample.kind]
    if sample.facts.get("count", 9) <= 5:
        names.append("counting up to 5")
    if sample.facts.get("characters") == 4 and sample.facts["height"] >= 20:
        names.append("reading 4 characters of 20 px")
    side = max(sample.facts["width"], sample.facts["image_height"])
    names.append(
        f"{sample.kind}, longer side {'up to 256' if side <= 271 else 'up to 512' if side <= 527 else 'above'}"
    )
    return names


def chosen(kind: str, seed: int, count: int, sizes: list[tuple[int, int]] | None) -> Iterator[Sample]:
    """`count` samples of a kind; of the kind `reading4` those of four characters of 20 pixels or more."""
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
    parser.add_argument("--side", type=int, default=0, help="one square size instead of all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.wrong:
        WRONG.append(True)
    judge = Judge(options.folder, getattr(torch, options.dtype))
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    sizes = [(options.side, options.side)] if options.side else None
    for kind in options.kinds.split(","):
        for sample in chosen(kind, options.seed, options.count, sizes):
            right, turns = judge.right(sample)
            for label in labels(sample):
                totals[label][0] += right
                totals[label][1] += turns
        print(
            json.dumps({k: interval(*v) for k, v in totals.items() if k.startswith(kind.rstrip("4"))}),
            flush=True,
        )


if __name__ == "__main__":
    main()
