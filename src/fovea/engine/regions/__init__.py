"""Encoding of images region by region, and all reductions. It must not import transformers."""
