"""Sampling: from logits to tokens. It must not import transformers."""
