"""Converts text configurations of transformers to `DecoderConfig`: one file per family of decoders."""

from __future__ import annotations

from fovea.engine.models.text.registry import Renames, decoder_config, text_renames, unused_tensors

__all__ = ["Renames", "decoder_config", "text_renames", "unused_tensors"]
