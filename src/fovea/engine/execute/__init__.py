"""Execution of step plans as tensors on one device. It must not import transformers."""
