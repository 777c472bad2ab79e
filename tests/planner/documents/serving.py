"""Figures of the document about serving: visual tokens, their KV, and how many requests fit."""

from __future__ import annotations

from tests.planner.documents.claim import Claim, Document
from tests.planner.documents.figures import (
    kv_bytes,
    needed,
    pooled_tokens,
    visual_tokens,
    weight_bytes,
    whole,
    words,
)

LAYERS, KV_HEADS, HEAD_DIM = 80, 8, 128
_TOKEN = kv_bytes(1, LAYERS, KV_HEADS, HEAD_DIM)
_MODEL = (
    "As printed, for a decoder of 80 layers that reads images as tokens. Llama 3.2 Vision itself reads them "
    "by cross-attention"
)


def _megabytes(tokens: int) -> float:
    return tokens * _TOKEN / 1e6


SERVING = Document(
    "Vision-Language Model Serving: ViT Encoding, Cross-Attention, and KV Cache Paging for Multimodal",
    (
        Claim("Introduction", "1024x1024 in patches of 14: 5,329 visual tokens", "(1024 // 14)^2",
              visual_tokens(1024, 1024), 5329),
        Claim("Introduction", "5,329 tokens are like a 5,000-word prompt", "5,329 / 1.3", words(5329), 5000,
              unit="words", relation="about", verdict="wrong",
              why="Its own table says 4,200 words, and 100 words are 130 tokens"),
        Claim("Introduction", "30 frames of 256 patches: 7,680", "30 x (224 // 14)^2",
              30 * visual_tokens(224, 224), 7680),
        Claim("The Token Count Problem", "224x224: 256", "(224 // 14)^2", visual_tokens(224, 224), 256),
        Claim("The Token Count Problem", "336x336: 576", "(336 // 14)^2", visual_tokens(336, 336), 576),
        Claim("The Token Count Problem", "672x672: 2,304", "(672 // 14)^2", visual_tokens(672, 672), 2304),
        Claim("The Token Count Problem", "the function above these examples gives 576 for 336x336",
              "576 // 2^2 + 1", pooled_tokens(336, 336), 576, verdict="wrong",
              why="Its default pools 2x2 patches and adds a class token"),
        Claim("The Token Count Problem", "LLaVA-1.6: 2,880 visual tokens", "(4 + 1) x (336 // 14)^2",
              5 * visual_tokens(336, 336), 2880),
        Claim("The Token Count Problem", "they are a 2x2 grid of 720-token images", "(336 // 14)^2",
              visual_tokens(336, 336), 720, verdict="wrong",
              why="They are four tiles and a view of the whole, of 576 tokens each"),
        Claim("Visual Token Counts", "four images of 336x336: 2,304", "4 x (336 // 14)^2",
              4 * visual_tokens(336, 336), 2304),
        Claim("Visual Token Counts", "576 tokens: about 450 words", "576 / 1.3", words(576), 450,
              unit="words", relation="about", verdict="rounded"),
        Claim("Visual Token Counts", "2,304 tokens: about 1,800 words", "2,304 / 1.3", words(2304), 1800,
              unit="words", relation="about", verdict="rounded"),
        Claim("Visual Token Counts", "7,680 tokens: about 6,000 words", "7,680 / 1.3", words(7680), 6000,
              unit="words", relation="about", verdict="rounded"),
        Claim("Visual Token Counts", "5,329 tokens: about 4,200 words", "5,329 / 1.3", words(5329), 4200,
              unit="words", relation="about", verdict="rounded"),
        Claim("KV Cache Impact", "4,096 bytes of KV per token and layer", "2 x 8 x 128 x 2",
              kv_bytes(1, 1, KV_HEADS, HEAD_DIM), 4096, unit="bytes"),
        Claim("KV Cache Impact", "576 tokens over 80 layers: 188.7 MB", "576 x 80 x 4,096", _megabytes(576),
              188.7, 1, "MB", why=_MODEL),
        Claim("KV Cache per Request Type", "500 tokens: 164 MB", "500 x 80 x 4,096", _megabytes(500), 164,
              unit="MB"),
        Claim("KV Cache per Request Type", "text and one image: 1,076 tokens", "500 + 576",
              500 + visual_tokens(336, 336), 1076),
        Claim("KV Cache per Request Type", "1,076 tokens: 352 MB", "1,076 x 80 x 4,096", _megabytes(1076),
              352,
              unit="MB", verdict="rounded", why="Cut off, not rounded"),
        Claim("KV Cache per Request Type", "2,804 tokens: 919 MB", "2,804 x 80 x 4,096", _megabytes(2804),
              919,
              unit="MB"),
        Claim("KV Cache per Request Type", "8,180 tokens: 2.68 GB", "8,180 x 80 x 4,096",
              _megabytes(8180) / 1e3, 2.68, 2, "GB"),
        Claim("KV Cache per Request Type", "a video takes 16 times a text request", "8,180 / 500", 8180 / 500,
              16),
        Claim("Video Kills Concurrency", "18 text requests fit into 50 GB", "50 GB / 163.84 MB",
              whole(50e9, 500 * _TOKEN), 18, verdict="wrong", why="18 is the number of videos that fit"),
        Claim("Video Kills Concurrency", "one video and few texts fit into 50 GB", "50 GB / 2.68 GB",
              whole(50e9, 8180 * _TOKEN), 1, verdict="wrong", why="18 such videos fit"),
        Claim("Validation", "about 305 text requests in 50 GB", "50 GB / 163.84 MB",
              whole(50e9, 500 * _TOKEN), 305, relation="about"),
        Claim("Validation", "about 142 image requests in 50 GB", "50 GB / 352.58 MB",
              whole(50e9, 1076 * _TOKEN), 142, relation="about", verdict="rounded",
              why="141.8: the last one does not fit"),
        Claim("Validation", "90 B in 16 bits: 180 GB", "90 x 10^9 x 2", weight_bytes(90e9, 16) / 1e9, 180,
              unit="GB"),
        Claim("Validation", "the weights need three GPUs of 80 GB", "180 / 80", needed(180, 80), 3),
        Claim("Validation", "about 50 GB for KV on each of the three", "(3 x 80 - 180) / 3",
              (3 * 80 - 180) / 3, 50, unit="GB", relation="about", verdict="wrong",
              why="At most 20 GB are left on each, and 8 KV heads cannot be divided by three GPUs"),
    ),
)  # fmt: skip
"""The document about serving."""
