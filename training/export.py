"""Writes the averaged weights of a run as a Hugging Face checkpoint and compares it with Hugging Face's own model.

python training/export.py --run runs/first [--random]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from batches import fitted
from common import ASSETS
from evaluate import VIDEO
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from model import Fovea, patches
from packing import Packer, Shown, collate, conversation
from several import group_times, grouped


def averaged(run: str) -> Fovea:
    model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    state = torch.load(Path(run) / "checkpoint.pt", map_location="cpu")
    model.load_state_dict(state["model"], strict=False)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), state["averaged"], strict=False):
            parameter.copy_(value)
    print("step", state["step"], "images", state["images"], "seconds", round(state["seconds"]))
    return model


def export(model: Fovea, folder: Path) -> None:
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name.startswith("model.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def difference(folder: Path) -> float:
    """Largest difference of the answer logits between this folder's model and the training module, in float32."""
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    mine = Fovea(json.loads((folder / "config.json").read_text())).eval()
    names = {name: value for name, value in theirs.state_dict().items() if name.startswith("model.")}
    mine.load_state_dict(names, strict=False)
    packer, size, grid, worst = Packer(str(folder / "tokenizer.json")), (224, 160), (5, 7), 0.0
    for index, kind in enumerate(("describe", "reading", "compare", "motion", "chat", VIDEO)):
        scenes, turns, _ = content("motion" if kind == VIDEO else kind, Random(index), size)
        pictures = [fitted(draw(scene), size) for scene in scenes]
        shown = Shown(grid, len(scenes))
        if kind == VIDEO:
            pictures, shown = grouped(pictures), Shown(grid, 0, group_times(len(scenes), 2.0))
        batch = collate([conversation(packer, list(turns), shown, None, False)], [pictures], pad_to=1)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        with torch.no_grad():
            ours = mine.logits(mine.hidden(tensors)[0])
            other = theirs(**for_transformers(packer, tensors)).logits
        worst = max(worst, float((ours - other).abs().max()))
    return worst


def for_transformers(packer: Packer, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers' model takes for a batch of one sequence without padding."""
    images, tokens = batch["images"][0], batch["tokens"]
    video = images.ndim == 5
    made = patches(images)
    # A patch is a frame twice or two frames; transformers has channels before frames.
    made = made.expand(-1, -1, 2, -1).unflatten(-1, (3, -1)).transpose(2, 3).flatten(0, 1).flatten(1)
    count, rows, columns = len(images), images.shape[-3] // 16, images.shape[-2] // 16
    kinds = (tokens == packer.image).int() + 2 * (tokens == packer.video).int()
    common = {"input_ids": tokens, "mm_token_type_ids": kinds}
    if video:
        return common | {
            "pixel_values_videos": made,
            "video_grid_thw": torch.tensor([[count, rows, columns]]),
        }
    return common | {"pixel_values": made, "image_grid_thw": torch.tensor([[1, rows, columns]] * count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/first")
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--random", action="store_true", help="untrained weights")
    options = parser.parse_args()
    if options.random:
        model = Fovea(json.loads((ASSETS / "config.json").read_text()))
    else:
        model = averaged(options.run)
    export(model, options.out)
    print("parameters", sum(p.numel() for p in model.model.parameters()))
    print("largest difference of logits", difference(options.out))


if __name__ == "__main__":
    main()
