"""Models built from checkpoints: one file per architecture.

`registry` finds the file of an architecture, `weights` reads the weights. Configurations, tokenizers and chat
templates come from transformers; the layers are Fovea's own.
"""
