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

from batches import Packer, collate, conversation, fitted
from common import ASSETS
from fovea.evaluation.scenes.dataset import content
from fovea.evaluation.scenes.draw import draw
from model import Fovea


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
    packer, worst = Packer(str(folder / "tokenizer.json")), 0.0
    for index, kind in enumerate(("describe", "reading", "compare", "motion", "chat")):
        size = (224, 160)
        scenes, turns, _ = content(kind, Random(index), size)
        packed = conversation(packer, list(turns), len(scenes), (5, 7), None, False)
        batch = collate([packed], [[fitted(draw(scene), size) for scene in scenes]], pad_to=1)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        with torch.no_grad():
            states, _ = mine.hidden(tensors)
            ours = mine.logits(states)
            images = tensors["images"][0].permute(0, 3, 1, 2).float() * (2 / 255) - 1
            count, rows, columns = len(scenes), 10, 14
            patches = images.view(count, 3, rows // 2, 2, 16, columns // 2, 2, 16).permute(
                0, 2, 5, 3, 6, 1, 4, 7
            )
            patches = (
                patches.unsqueeze(6).expand(*patches.shape[:6], 2, 16, 16).reshape(count * rows * columns, -1)
            )
            other = theirs(
                input_ids=tensors["tokens"],
                pixel_values=patches,
                image_grid_thw=torch.tensor([[1, rows, columns]] * count),
                mm_token_type_ids=(tensors["tokens"] == packer.image).int(),
            ).logits
        worst = max(worst, float((ours - other).abs().max()))
    return worst


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
