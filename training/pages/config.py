"""Paths and the configuration of fovea-page: a Qwen3-VL of 25 M parameters whose text is bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common import HERE, SPECIAL_TOKENS, model_config
from make_tokenizer import SPLIT

PAGES = HERE / "runs" / "pages"
MODEL = HERE.parent / "packages" / "page" / "fovea_page" / "model"


def tokenizer() -> Tokenizer:
    """One token for each byte, and the special tokens: a name or a number is read letter by letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return made


def page_config(made: Tokenizer) -> dict[str, Any]:
    """The content of config.json."""
    config: dict[str, Any] = model_config(made)
    config["text_config"] |= {
        "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 9, "num_attention_heads": 6,
        "head_dim": 128,
    }  # fmt: skip
    # As published. Most frequencies hardly turn within a page, so that letters are compared alike everywhere.
    config["text_config"]["rope_theta"] = config["text_config"]["rope_parameters"]["rope_theta"] = 5e6
    for name in ("rope_parameters", "rope_scaling"):
        config["text_config"][name]["mrope_section"] = [24, 20, 20]
    config["vision_config"] |= {
        "depth": 6, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "out_hidden_size": 384,
        "deepstack_visual_indexes": [2, 4],
    }  # fmt: skip
    return config


def folder(run: str | Path) -> Path:
    """The folder of a run."""
    return HERE / run if not Path(run).is_absolute() else Path(run)
