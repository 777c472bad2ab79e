"""Checks a whole checkpoint in seconds. It uses the steps of loading, with a model whose tensors are empty.

The model is built on torch's meta device, so its weights take no memory. Every step reports its errors.
The next step is done all the same, unless it needs the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fovea.engine.check.prompt import check_processors, check_prompt
from fovea.engine.check.report import Report
from fovea.engine.check.tensors import StoredTensors, check_tensors, read_stored
from fovea.engine.files import WEIGHTS, folder_problems, read_json
from fovea.engine.layers.config import Experts, LayerConfig
from fovea.engine.load import (
    build_model,
    count_parameters,
    default_sampling,
    expect_unquantized,
    read_config,
    resolve,
    untie_own_head,
)
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.registry import architecture_of
from fovea.engine.models.relevance_head import read_head
from fovea.engine.models.weights import DTYPES, common_dtype

INDEX = "model.safetensors.index.json"
HEAD = "relevance.safetensors"
CONFIG_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json")
"""Files that the configuration is read from. Original InternVL checkpoints need the ids of tokens."""


def check_checkpoint(name: str, revision: str = "") -> Report:
    """Say whether a checkpoint would load, and what is missing. No weight is read, and nothing is downloaded.

    name: a folder, the bundled model, or a hub id whose files are in the local cache.
    revision: see `load.resolve`.

    Raises CheckpointError or ConfigError if there is no such folder. Everything else is in the report.
    """
    folder = resolve(name, revision, download=False)
    report = Report(name, folder)
    refused = _check_files(folder, report)
    config = None
    if not any(path.name in CONFIG_FILES for path in refused):
        config = report.attempt("config", lambda: read_config(folder))
    stored = report.attempt("weights", lambda: read_stored(folder, report, refused))
    if stored is not None:
        _state_files(folder, stored, report)
    if config is None:
        report.skip("model", "tensors, images and prompt: config.json, or a file read with it, is faulty")
        return report
    model = report.attempt("model", lambda: _check_model(folder, config, stored, report))
    if model is not None and not any(path.name == HEAD for path in refused):
        width = model.decoder.config.hidden
        report.attempt("relevance", lambda: read_head(folder, width))
    # Libraries open these files themselves. So the check ends here if one of them must not be opened.
    if unsafe := [path.name for path in refused if path.suffix != WEIGHTS]:
        report.skip("prompt", f"images and prompt: {', '.join(unsafe[:3])} must not be opened")
        return report
    report.attempt("generation", lambda: default_sampling(folder))
    processors = check_processors(folder, config, report)
    check_prompt(folder, config, model, processors, report)
    return report


def _check_files(folder: Path, report: Report) -> list[Path]:
    """Report the files that must not be opened, and return them."""
    refused = []
    for path, error in report.attempt("files", lambda: list(folder_problems(folder))) or ():
        refused.append(path)
        report.add_error("files", error.message)
    return refused


def _check_model(
    folder: Path, config: Any, stored: StoredTensors | None, report: Report
) -> VisionLanguageModel | None:
    entries = [] if stored is None else list(stored.entries)
    known = [entry for entry in entries if entry.shape is not None]
    dtype = common_dtype(known) if known else _declared_dtype(config)
    quantized = bool(getattr(config, "quantization_config", None))
    report.attempt("config", lambda: expect_unquantized(folder, config))
    untie_own_head(config, (entry.name for entry in entries))
    model = report.attempt("config", lambda: build_model(folder, config, torch.device("meta"), dtype))
    if model is None:
        return None
    _state_model(config, model, dtype, report)
    if quantized:
        report.skip("weights", "the names of tensors: the checkpoint is quantized")
    elif stored is not None:
        assignment = check_tensors(stored, model, report)
        report.facts["unused_tensors"] = len(assignment.ignored)
    return model


def _declared_dtype(config: Any) -> torch.dtype:
    """The type that config.json names; float32 if it names none that is a float."""
    for part in (config, config.text_config):
        dtype = getattr(part, "dtype", None)
        if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
            return dtype
    return torch.float32


def _state_files(folder: Path, stored: StoredTensors, report: Report) -> None:
    report.facts["files"] = len(stored.files)
    report.facts["tensors"] = sum(1 for _ in stored.entries)
    if all(entry.shape is not None for entry in stored.entries):
        report.facts["weight_bytes"] = sum(entry.stop - entry.start for entry in stored.entries)
        return
    totals = report.attempt("weights", lambda: read_json(folder / INDEX).get("metadata"))
    size = totals.get("total_size") if isinstance(totals, dict) else None
    if isinstance(size, int) and size >= 0:
        report.facts["weight_bytes"] = size


def _state_model(config: Any, model: VisionLanguageModel, dtype: torch.dtype, report: Report) -> None:
    """Note the figures that decide how much memory the model needs."""
    decoder = model.decoder.config
    report.facts |= {
        "architecture": architecture_of(config).name,
        "model_type": config.model_type,
        "parameters": count_parameters(model),
        "dtype": str(dtype).removeprefix("torch."),
        "layers": len(decoder.layers),
        "vocabulary": decoder.vocab_size,
        "context": decoder.max_positions,
        "kv_bytes_per_token": decoder.kv_bytes_per_token(dtype.itemsize),
        "state_bytes_per_sequence": decoder.state_bytes(dtype.itemsize),
    }
    if experts := _experts(decoder.layers):
        report.facts["experts"] = experts


def _experts(layers: Iterable[LayerConfig]) -> str:
    """Number of experts of a layer, and how many of them compute a token; empty for a dense model."""
    for layer in layers:
        block = layer.feed_forward
        if isinstance(block, Experts):
            return f"{block.count}, {block.active} per token"
    return ""
