"""Builds the tokenizer and all configuration files of fovea-tiny. The weights come from `export.py`.

    python training/make_tokenizer.py

The BPE merges are learnt from the generator's text. Codes and the word JSON are removed from it first, so
that no merge joins two capital letters. Every code is therefore read and written one character at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common import ASSETS, SPECIAL_TOKENS, model_config
from fovea.evaluation.scenes.chat import small_talk
from fovea.evaluation.scenes.dataset import KINDS, content

VOCABULARY = 1024
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CHAT_WORDS = "system\nuser\nassistant\nYou are a helpful assistant.\nPicture : \n"


def corpus(count: int = 40_000) -> list[str]:
    """The texts from which the merges are learnt, of `count` samples."""
    lines = [CHAT_WORDS] * 200
    for index in range(count):
        rng = Random(f"tokenizer/{index}")
        scenes, turns, _ = content(rng.choice(KINDS), rng, (192, 192))
        codes = [label.text for scene in scenes for label in scene.labels]
        for turn in [*turns, small_talk(rng)]:
            for text in (turn.question, turn.answer):
                for word in [*codes, "JSON"]:
                    text = text.replace(word, "")
                lines.append(text)
    return lines


def build() -> Tokenizer:
    """A tokenizer, trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=5,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _write(name: str, value: object) -> None:
    (ASSETS / name).write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    ASSETS.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    tokenizer.save(str(ASSETS / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    print("vocabulary", tokenizer.get_vocab_size(), ids)
    template = TEMPLATE.read_text()
    (ASSETS / "chat_template.jinja").write_text(template)
    _write(
        "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "extra_special_tokens": {
                "image_token": "<|image_pad|>",
                "video_token": "<|video_pad|>",
                "vision_bos_token": "<|vision_start|>",
                "vision_eos_token": "<|vision_end|>",
            },
            "model_max_length": 8192,
            "pad_token": "<|endoftext|>",
            "processor_class": "Qwen3VLProcessor",
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    image = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 1344 * 896},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    _write("preprocessor_config.json", image | {"image_processor_type": "Qwen2VLImageProcessorFast"})
    video = {
        "size": {"shortest_edge": 2 * 64 * 64, "longest_edge": 16 * 1024 * 1024},
        "fps": 2,
        "min_frames": 4,
    }
    video |= {"max_frames": 64, "video_processor_type": "Qwen3VLVideoProcessor"}
    _write("video_preprocessor_config.json", image | video)
    _write(
        "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    _write("config.json", model_config(tokenizer))


if __name__ == "__main__":
    main()
