from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fovea import Engine
from fovea.media.limits import MediaLimits
from fovea.server.settings import ServerSettings
from tests.server.support import Server, picture, running
from tests.support.checkpoints import write

MAX_BODY_MIB = 2
MAX_IMAGE_BYTES = 1024 * 1024
MAX_IMAGES = 4
LARGEST = 256
"""Visual tokens of the largest image: four times what detail "low" allows."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write("qwen3_vl", tmp_path_factory.mktemp("server") / "tiny")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_pixels": LARGEST * 32**2}))
    return folder


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(str(checkpoint), dtype="float32", threads=1, kv_cache_mib=32) as engine:
        yield engine


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of file:// URLs; beside it lies a picture that they may not read."""
    folder = tmp_path_factory.mktemp("files")
    inside = folder / "allowed"
    inside.mkdir()
    (inside / "picture.png").write_bytes(picture(seed=7))
    (folder / "secret.png").write_bytes(picture(seed=8))
    (inside / "link.png").symlink_to(folder / "secret.png")
    return inside


@pytest.fixture(scope="session")
def server(engine: Engine, files: Path) -> Iterator[Server]:
    media = MediaLimits(file_root=files, max_bytes=MAX_IMAGE_BYTES, max_images=MAX_IMAGES)
    with running(engine, ServerSettings(max_body_mib=MAX_BODY_MIB, media=media), files) as server:
        yield server
