"""Tokenizers and special tokens of tiny checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
MORE_SPECIALS = {
    **dict.fromkeys(("internvl", "internvl_chat"), ["<img>", "</img>", "<IMG_CONTEXT>"]),
    "lfm2_vl": [
        "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ],
    **dict.fromkeys(
        ("pixtral", "mistral3"), ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    ),
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "gemma4": ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>"],
    "minicpmv4_6": ["</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
    "mllama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    **dict.fromkeys(
        ("glm4v", "glm46v"),
        [
            "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>",
            "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>",
        ],
    ),
    "paddleocr_vl": ["<|begin_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"],
}  # fmt: skip
"""Further special tokens of some architectures. In all of them they would change the ids of the others."""
LAST_SPECIALS = {"mllama": ["<|image|>"]}
"""Special tokens that come after all others. Their ids are beyond the rows of the language head."""
CORPUS = [
    "What is in the image? Describe the picture, please.",
    "the red circle is left of the blue square",
] * 4
VOCABULARY = 384
VIDEO_MARKERS = {
    "llava_onevision": "<video>",
    "minicpmv4_6": "<|video_pad|>",
    **dict.fromkeys(("glm4v", "glm46v"), "<|video|>"),
}
"""Video tokens of architectures that take no videos in Fovea. Their configurations name the tokens."""


def tokenizer(template: str, more: Sequence[str] = (), last: Sequence[str] = ()) -> Any:
    """A tokenizer whose first ids are special tokens, `more` among them, and whose last ids are `last`."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIALS, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens(list(last))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
