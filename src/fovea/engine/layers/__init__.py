"""The layers of all models. It must not import transformers.

Their attribute names are those of the checkpoints, so loading needs no table of names.
"""
