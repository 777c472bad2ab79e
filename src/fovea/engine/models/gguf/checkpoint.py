"""A model in one or more GGUF files, with its vision tower in a file of its own ("mmproj")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from fovea.core.errors import CheckpointError, ConfigError
from fovea.dialects.dialect import Dialect, detect
from fovea.engine.files import check_bounds, check_file
from fovea.engine.models.gguf.metadata import Metadata
from fovea.engine.models.gguf.reader import SUFFIX, GgufFile, is_first, open_split
from fovea.engine.models.gguf.text import text_config, text_only, text_sources
from fovea.engine.models.gguf.tokenizer import build_tokenizer, chat_template, end_ids, read_vocabulary
from fovea.engine.models.gguf.towers import Tower
from fovea.engine.models.gguf.weights import GgufWeights
from fovea.engine.models.look_heads import Head, read_heads
from fovea.engine.models.side_files import processors_of
from fovea.engine.models.tokenizer import make_tokenizer, reason
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.none import NoImages
from fovea.engine.vision.processor.video import QwenVideos

TOWER = "mmproj"
"""Part of the names of files with vision towers."""
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""Entries of general.sampling, and their names in generation_config.json."""


class GgufCheckpoint:
    """A model in GGUF files. Raises CheckpointError or UnsupportedModel for files that cannot be read.

    path: a file of the model, or the folder that holds it. It is the name of the checkpoint in messages.
    model: a file of the model.
    tower: the file of its vision tower; None: the model reads text alone.
    """

    def __init__(self, path: Path, model: Path, tower: Path | None = None) -> None:
        self.path = path
        self._files = open_split(model)
        self._tower_file = None if tower is None else GgufFile(tower)
        self.images_need = "" if tower else "start with --mmproj FILE, the file of the model's vision tower"

    @cached_property
    def _text(self) -> dict[str, Any]:
        return text_config(self._files)

    @cached_property
    def _tower(self) -> Tower | None:
        if self._tower_file is None:
            return None
        vocabulary = read_vocabulary(self._files[0])
        ids = {token: number for number, token in enumerate(vocabulary.tokens)}
        return Tower(self._tower_file, self._text, ids)

    def config(self) -> Any:
        """Return the configuration as transformers reads it. Raises CheckpointError or UnsupportedModel."""
        from transformers import CONFIG_MAPPING

        tower = self._tower
        content = text_only(self._files[0], self._text) if tower is None else tower.config()
        check_bounds(content, self._files[0].path)
        try:
            return CONFIG_MAPPING[content["model_type"]].from_dict(content)
        except Exception as error:
            raise CheckpointError(f"{self._files[0].path} cannot be used: {reason(error)}") from error

    def weights(self, config: Any) -> GgufWeights:
        """Return the tensors. config: see `config`; its values are in the files, too."""
        files, sources = list(self._files), list(text_sources(self._files, self._text))
        if self._tower is not None:
            sources += self._tower.sources(len(files))
            files.append(self._tower.file)
        return GgufWeights(files, sources)

    def tokenizer(
        self,
        config: Any,
        *,
        template: str | None = None,
        dialect: Callable[[str | None], Dialect] = detect,
    ) -> ChatTokenizer:
        """See `models.tokenizer.load_tokenizer`."""
        file = self._files[0]
        try:
            tokenizer = build_tokenizer(file)
        except (CheckpointError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library's Rust code is not an Exception
            raise CheckpointError(f"{file.path} has no usable tokenizer: {reason(error)}") from error
        return make_tokenizer(
            tokenizer, config, template or chat_template(file), end_ids(file), dialect=dialect
        )

    def processors(self, config: Any) -> tuple[ImageProcessor, QwenVideos | None]:
        """Return the processors of images and videos. config: see `config`."""
        if self._tower is None:
            return NoImages(), None
        model = self._tower.model
        return processors_of(config, model.images, model.videos, model.joint, self._tower.file.path)

    def look_heads(self, known: Iterable[Head]) -> tuple[Head, ...] | None:
        """Read them from the folder of the file, under its name."""
        return read_heads(self._files[0].path, known)

    def default_sampling(self) -> dict[str, float | int]:
        """Return the sampling defaults of the metadata, for parameters that a request does not set."""
        entries = Metadata(self._files[0], "general.sampling.")
        return {name: entries.number(key) for key, name in SAMPLING.items() if key in entries}


def find_gguf(path: Path, tower: str = "") -> GgufCheckpoint | None:
    """Return the model in a GGUF file, or in the only one of a folder; None: there is none.

    tower: the file of the vision tower; "": the only one of the folder, if `path` is a folder.

    Raises CheckpointError if the folder holds several models, or if a file is broken. Raises ConfigError for
    the tower of a model that is no GGUF file.
    """
    model = path if path.suffix == SUFFIX and path.is_file() else None
    found: list[Path] = []
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file for file in path.glob(f"*{SUFFIX}") if is_first(file))
        model = _only(path, [file for file in files if TOWER not in file.name.lower()], "models")
        found = [file for file in files if TOWER in file.name.lower()]
    if model is None:
        if tower:
            raise ConfigError(
                f"mmproj is {tower!r}, but {path} is no GGUF file; accepted: a vision tower of a GGUF file, "
                "beside that file",
                param="mmproj",
            )
        return None
    if tower:
        return GgufCheckpoint(path, model, _tower_file(tower))
    return GgufCheckpoint(path, model, _only(path, found, "vision towers"))


def _only(folder: Path, files: list[Path], what: str) -> Path | None:
    """Return the only file; None: there is none. Raises CheckpointError if there are more."""
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        hint = "name one with --mmproj" if what != "models" else "name the file itself instead of the folder"
        raise CheckpointError(f"{folder} holds {len(files)} {what} in GGUF files ({names}); {hint}")
    for file in files:
        check_file(file, folder.resolve())
    return files[0] if files else None


def _tower_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix != SUFFIX or not path.is_file():
        raise ConfigError(f"mmproj is {name!r}; accepted: an existing file *{SUFFIX}", param="mmproj")
    return path
