"""Writes quantized checkpoints, with scales that are calibrated on questions about images and on texts."""
