"""Preparation of a request: prompt, pixels, admission, answer text. It must not import torch."""
