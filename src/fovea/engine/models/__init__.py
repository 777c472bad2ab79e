"""Checkpoints to models: one file per architecture, `registry` finds it, `load` fills it.

Configurations, tokenizers and chat templates are transformers' own; the layers are ours.
"""
