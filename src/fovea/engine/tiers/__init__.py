"""Tiers of encoder outputs below the device's memory: host memory, disk. It must not import transformers."""
