from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from fovea import Engine
from fovea.cli.main import build_parser
from fovea.engine.config import EngineConfig
from fovea.engine.layers.ranks import ALONE, Ranks
from fovea.engine.load import LoadedModel, load_model
from fovea.kernels.native.instruction_sets import VARIABLE
from tests.cli.support import Caller
from tests.support.checkpoints import SPECIALS, write
from tests.support.decoders import kept_decoders
from tests.support.http_clients import one_tls_context


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all settings of the environment; set a small engine and a terminal of 80 columns."""
    for name in list(os.environ):
        if name.startswith("FOVEA_") and name != VARIABLE:
            monkeypatch.delenv(name)
    monkeypatch.setenv("FOVEA_THREADS", "1")
    monkeypatch.setenv("FOVEA_KV_CACHE_MIB", "16")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True, scope="package")
def _cheap_clients_and_decoders() -> Iterator[None]:
    with one_tls_context(), kept_decoders():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights.

    Its greedy answers do not end: special tokens are never the likeliest.
    """
    folder = write("qwen3_vl", tmp_path_factory.mktemp("cli") / "tiny")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][: len(SPECIALS)] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Iterator[Engine]:
    """An engine with the same checkpoint, for the expected answers."""
    with Engine.from_pretrained(str(tiny), threads=1, kv_cache_mib=16) as engine:
        yield engine


_LOADED: dict[tuple[object, ...], LoadedModel] = {}


@pytest.fixture(autouse=True)
def _weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process share the weights of a checkpoint while its files do not change."""

    def load(
        name: str, settings: EngineConfig, *, chat_template: str | None = None, ranks: Ranks = ALONE
    ) -> LoadedModel:
        path = Path(name)
        if settings.model.encoder_engines not in ("", "auto", "off") or not path.is_dir() or ranks.size > 1:
            return load_model(name, settings, chat_template=chat_template, ranks=ranks)
        files = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.iterdir())
        key = (path.resolve(), *files, repr(settings.model), settings.outputs.embed_disk_dir, chat_template)
        if key not in _LOADED:
            _LOADED[key] = load_model(name, settings, chat_template=chat_template)
        return _LOADED[key]

    monkeypatch.setattr("fovea.engine.engine.load_model", load)


@cache
def _parser(commands: tuple[str, ...], *_: tuple[str, str]) -> argparse.ArgumentParser:
    return build_parser(*commands)


@pytest.fixture(autouse=True)
def _parser_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process share the parser of all flags, which takes 30 ms each time.

    Defaults come from variables, so it is another one with other variables.
    """

    def parser(*commands: str) -> argparse.ArgumentParser:
        return _parser(
            commands, *(pair for pair in sorted(os.environ.items()) if pair[0].startswith("FOVEA_"))
        )

    monkeypatch.setattr("fovea.cli.main.build_parser", parser)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images, a.png and b.png, and a file that is not an image, no.png."""
    for seed, name in enumerate(("a.png", "b.png")):
        noise = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
    (tmp_path / "no.png").write_text("these are words")
    return tmp_path


@pytest.fixture
def fovea(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    return Caller(capsys, monkeypatch)
