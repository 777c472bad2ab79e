"""Writes the averaged weights of a run as a Hugging Face checkpoint, and compares them with Hugging Face's
model.

    python -m pages.export --run runs/page
    python -m pages.export --run runs/page --out runs/page/model       # to try an unfinished model

Weights are bfloat16.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from export import export, for_transformers
from make_tokenizer import write_settings
from model import Fovea
from packing import Packer, PromptMedia, collate, conversation
from pages.asked import WHOLE, ask
from pages.config import MODEL, PAGES, folder, page_config, tokenizer
from pages.crops import Store, cut

LONGEST_EDGE = 1344 * 1344
"""Pixels of the largest page that the model takes without making it smaller."""


def averaged(run: Path, made: Tokenizer) -> Fovea:
    """The model with the averaged weights of a run's checkpoint."""
    model = Fovea(page_config(made), {})
    read_only = not (run / "checkpoint.pt").exists()  # the tower reads, but no question was trained yet
    state = torch.load(run / ("read.pt" if read_only else "checkpoint.pt"), map_location="cpu")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), state["averaged"], strict=True):
            parameter.copy_(value)
    print("step", state["step"], "seconds", round(state["seconds"]))
    return model


def difference(out: Path, made: Tokenizer) -> float:
    """The largest difference of logits between Hugging Face's model and the training model, in float32."""
    theirs = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    mine = Fovea(page_config(made), {}).eval()
    names = {name: value for name, value in theirs.state_dict().items() if name.startswith("model.")}
    mine.load_state_dict(names, strict=False)
    packer, worst = Packer(made), 0.0
    pages = Store(PAGES)
    for index in range(3):
        rng = Random(index)
        page = pages.page(rng)
        size = (page.image.size[0] // 32 * 32, page.image.size[1] // 32 * 32)
        media = PromptMedia((size[1] // 32, size[0] // 32))
        turns = ask(rng, page, 2)
        picture = cut(rng, page, size, WHOLE)
        batch = collate([conversation(packer, turns, media, None, False)], [[picture]], pad_to=1)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        with torch.no_grad():
            ours = mine.logits(mine.hidden(tensors)[0])
            other = theirs(**for_transformers(packer, tensors)).logits
        worst = max(worst, float((ours - other).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="runs/page")
    parser.add_argument("--out", type=Path, default=MODEL)
    options = parser.parse_args()
    made = tokenizer()
    model = averaged(folder(options.run), made)
    write_settings(options.out, made, page_config(made), LONGEST_EDGE)
    export(model, options.out)
    print("parameters", sum(p.numel() for p in model.model.parameters()))
    print("largest difference of logits", difference(options.out, made))


if __name__ == "__main__":
    main()
