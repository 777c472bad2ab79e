"""Loads what computes drafts: a trained layer (EAGLE-3, or a checkpoint's own MTP), and a draft model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from fovea.core.errors import CheckpointError, ConfigError, FoveaError
from fovea.engine.config import EngineConfig
from fovea.engine.execute.model_drafter import check_draft_model
from fovea.engine.layers.draft import DraftLayer
from fovea.engine.load import LoadedModel, load_model, open_checkpoint
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.draft_layer import EAGLE_FOLDER, MTP_PREFIX, load_eagle3, load_mtp

log = logging.getLogger("fovea.engine")
LEAST_AGREEMENT = 0.99
"""Share of the vocabulary that a draft model must have with the same ids. Models of one family differ in a
few control tokens."""


class Drafting(NamedTuple):
    """The parts that compute drafts. None: there is none, or it may not be used."""

    layer: DraftLayer | None = None
    model: VisionLanguageModel | None = None

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layer's keys and values for each token."""
        layer = self.layer
        return 0 if layer is None else layer.config.kv_bytes_per_token(layer.dtype.itemsize)

    @property
    def token_bytes(self) -> int:
        """Bytes of all keys and values for each token."""
        if self.model is None:
            return self.layer_bytes
        own = self.model.decoder.config.kv_bytes_per_token(self.model.dtype.itemsize)
        return self.layer_bytes + own


def load_drafting(loaded: LoadedModel, config: EngineConfig) -> Drafting:
    """Load what the settings name for a loaded target.

    Raises CheckpointError, UnsupportedModel or ConfigError. A layer that is only found beside the target, and
    that does not fit, is left out with a warning.
    """
    drafters = config.speculation.drafters
    layer = _layer(loaded, config) if "layer" in drafters else None
    model = _model(loaded, config) if "model" in drafters and config.speculation.draft_model else None
    return Drafting(layer, model)


def _layer(loaded: LoadedModel, config: EngineConfig) -> DraftLayer | None:
    name = config.speculation.draft_layer
    if name == "off":
        return None
    if name != "auto":
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"draft_layer: {name!r} is no folder", param="draft_layer")
        return _checked(load_eagle3(folder, loaded.model))
    try:
        folder = loaded.path / EAGLE_FOLDER
        if folder.is_dir():
            return _checked(load_eagle3(folder, loaded.model))
        return _own(loaded, config)
    except FoveaError as error:
        log.warning("drafts are not computed by the model's own layer: %s", error.message)
        return None


def _own(loaded: LoadedModel, config: EngineConfig) -> DraftLayer | None:
    """Load the MTP layer of the target's checkpoint; None: it has none."""
    if loaded.path == Path():
        return None
    checkpoint = open_checkpoint(loaded.path, config.model.mmproj)
    stored = checkpoint.weights(checkpoint.config())
    if not any(entry.name.startswith(MTP_PREFIX) for _, entries in stored.files for entry in entries):
        stored.close()
        return None
    return _checked(load_mtp(stored, loaded.model))


def _checked(layer: DraftLayer) -> DraftLayer:
    """Return a layer whose taps the target's steps have. Raises CheckpointError."""
    decoder = layer.target.decoder.config
    last = len(decoder.layers)
    if decoder.writing_layers < last and layer.taps[-1] >= decoder.writing_layers:
        raise CheckpointError(
            f"the draft layer reads the states before layer {layer.taps[-1]}, but layers from "
            f"{decoder.writing_layers} on of this model compute only the last tokens of a prompt"
        )
    return layer


def _model(loaded: LoadedModel, config: EngineConfig) -> VisionLanguageModel:
    name = config.speculation.draft_model
    own = config.changed(
        quantization=config.speculation.draft_quantization,
        speculate="off",
        encoder_engines="off",
        revision="",
        mmproj="",
        embed_disk_dir="",
    )
    draft = load_model(name, own)
    agreement = loaded.tokenizer.agreement(draft.tokenizer)
    if agreement < LEAST_AGREEMENT:
        raise ConfigError(
            f"draft_model {name!r} has another tokenizer: {agreement:.0%} of the model's tokens have the "
            f"same id there; accepted: at least {LEAST_AGREEMENT:.0%}",
            param="draft_model",
        )
    check_draft_model(draft.model)
    return draft.model
