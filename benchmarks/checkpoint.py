"""Write checkpoints with random weights for measuring speed.

One has the shape of a small Qwen2.5-VL with 0.5 B parameters, one that of Qwen2.5-VL-7B. One is tiny, to
rehearse a measurement.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from fovea.bench.context import WORDS

TEXT: dict[str, Any] = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 32_000, "max_position_embeddings": 32_768,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "out_hidden_size": 896,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [2, 5, 8, 11],
}  # fmt: skip
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LARGE_TEXT: dict[str, Any] = {
    **TEXT, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152_064, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
LARGE_VISION: dict[str, Any] = {
    **VISION, "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
"""The shape of Qwen2.5-VL-7B, with about 8 B parameters."""
TINY_TEXT: dict[str, Any] = {
    **TEXT, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}  # fmt: skip
TINY_VISION: dict[str, Any] = {
    **VISION, "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}  # fmt: skip
SHAPES = {"small": (TEXT, VISION), "7b": (LARGE_TEXT, LARGE_VISION), "tiny": (TINY_TEXT, TINY_VISION)}


def _words(models: Any, alphabet: list[str], count: int) -> Any:
    """A BPE vocabulary in which every id has a text, and each word of `fovea bench` is one token.

    " abc" is one token for any three letters, too. So a prompt has as many tokens as words. A client sees
    every token of a random model, which it would not if an id had no text. And an answer that is sent back
    becomes the same tokens again.
    """
    texts = dict.fromkeys(SPECIALS + sorted(alphabet))
    merges: list[tuple[str, str]] = []

    def add(stem: str, letter: str) -> None:
        if stem + letter not in texts and len(texts) < count:
            texts[stem + letter] = None
            merges.append((stem, letter))

    for length in range(3):
        for stem in product(ascii_lowercase, repeat=length):
            for letter in ascii_lowercase:
                add("".join(("Ġ", *stem)), letter)
    for word in WORDS:
        for end in range(3, len(word)):
            add("Ġ" + word[:end], word[end])
    for letters in product(ascii_lowercase, repeat=4):
        add("".join(("Ġ", *letters[:3])), letters[3])
    return models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=merges)


def write_checkpoint(folder: Path, *, shape: str = "small", device: str = "cpu") -> Path:
    """Write a checkpoint in bf16, unless the folder holds a complete one.

    shape: one of SHAPES; "small" takes about 1 GB, "7b" 17 GB, "tiny" 5 MB.
    device: the device on which the weights are drawn.
    """
    text, vision = SHAPES[shape]
    marker = folder / "complete"
    if marker.exists():
        return folder
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    raw = Tokenizer(_words(models, pre_tokenizers.ByteLevel.alphabet(), text["vocab_size"]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIALS)
    words = hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    tied = text["tie_word_embeddings"]
    config = hf.Qwen2_5_VLConfig(vision_config=vision, text_config=text, tie_word_embeddings=tied, **ids)
    with torch.device(device):
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    marker.touch()
    return folder
