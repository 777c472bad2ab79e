"""Says whether a checkpoint would load, and what is missing, without reading its weights.

It uses the steps of loading, with a model on torch's meta device, so its weights take no memory. Every step
reports its errors. The next step is done all the same, unless it needs the result.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from fovea.core.errors import CheckpointError, FoveaError, UnsupportedModel
from fovea.core.media import Image, PixelBudget
from fovea.core.names import served_name
from fovea.core.types import ChatPrompt, ImagePart, Message, TextPart
from fovea.engine.files import WEIGHTS, folder_problems, read_json
from fovea.engine.layers.config import Experts, LayerConfig
from fovea.engine.load import (
    Checkpoint,
    Folder,
    build_model,
    count_parameters,
    read_config,
    resolve,
    untie_own_head,
)
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.gguf.checkpoint import GgufCheckpoint, find_gguf
from fovea.engine.models.look_heads import read_heads
from fovea.engine.models.quantized import find_family
from fovea.engine.models.registry import architecture_of
from fovea.engine.models.stored import (
    DTYPES,
    STORED_TYPES,
    SafetensorsWeights,
    Shards,
    common_dtype,
    find_shards,
    read_entries,
)
from fovea.engine.models.targets import Assignment, Problem, TensorEntry, assign
from fovea.engine.models.text import text_config
from fovea.engine.profile import shape_of
from fovea.engine.request.prompt import PromptBuilder
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.video import QwenVideos
from fovea.planner.shape import ModelShape

T = TypeVar("T")
PART = "weights"
MOST_GROUPS = 40
"""Most findings about tensors; the rest are counted."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots, such as that of a layer."""
_PLURAL = {
    "unknown": "are not part of this architecture",
    "missing": "are missing",
    "repeated": "are there a second time",
}
WIDTH, HEIGHT = 1024, 768
"""Pixels of the image that is planned."""
SECONDS = 60.0
"""Longest time for the tokenizer and the template, which are programs of the checkpoint's author."""
Processors = tuple[ImageProcessor, QwenVideos | None]
"""The processor of images, and the planner of videos if the model takes videos."""
INDEX = "model.safetensors.index.json"
CONFIG_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json")
"""Files that the configuration is read from. Original InternVL checkpoints need the ids of tokens."""


def check_checkpoint(name: str, revision: str = "", mmproj: str = "") -> Report:
    """Say whether a checkpoint would load, and what is missing. No weight is read, and nothing is downloaded.

    name: a folder, the bundled model, or a hub id whose files are in the local cache.
    revision: see `load.resolve`.
    mmproj: see `load.open_checkpoint`.

    Raises CheckpointError or ConfigError if there is no such folder. Everything else is in the report.
    """
    folder = resolve(name, revision, download=False)
    report = Report(name, folder)
    try:
        gguf = find_gguf(folder, mmproj)
    except CheckpointError as error:
        report.add_error("files", error.message)
        return report
    if gguf is not None:
        _check_gguf(gguf, report)
        return report
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
    if model is not None:
        known = model.decoder.config.look_heads
        report.attempt("relevance", lambda: read_heads(folder, known))
    # Libraries open these files themselves. So the check ends here if one of them must not be opened.
    if unsafe := [path.name for path in refused if path.suffix != WEIGHTS]:
        report.skip("prompt", f"images and prompt: {', '.join(unsafe[:3])} must not be opened")
        return report
    _check_use(Folder(folder), config, model, report)
    return report


def _check_gguf(checkpoint: GgufCheckpoint, report: Report) -> None:
    """Check a model in GGUF files. Their headers are read already."""
    config = report.attempt("config", checkpoint.config)
    if config is None:
        report.skip("model", "tensors, images and prompt: the metadata is faulty")
        return
    weights = report.attempt("weights", lambda: checkpoint.weights(config))
    stored = None if weights is None else StoredTensors(tuple(weights.files))
    if stored is not None and weights is not None:
        _state_files(checkpoint.path, stored, report)
        if weights.quantization:
            entries = list(stored.entries)
            kept = [entry for entry in entries if entry.coded]
            report.facts |= {
                "quantization": weights.quantization,
                "quantized_weights": weights.quantized,
                "kept_weights": len(kept),
                "kept_bytes": sum(entry.stop - entry.start for entry in kept),
                "kept_parameters": sum(prod(entry.shape or ()) for entry in kept),
            }
    model = report.attempt("model", lambda: _check_model(checkpoint.path, config, stored, report))
    _check_use(checkpoint, config, model, report)


def _check_use(
    checkpoint: Checkpoint, config: Any, model: VisionLanguageModel | None, report: Report
) -> None:
    """Check everything that requests need beside the model."""
    report.attempt("generation", checkpoint.default_sampling)
    processors = check_processors(checkpoint, config, report)
    check_prompt(checkpoint, config, model, processors, report)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a checkpoint, or may be.

    part: the part of the checkpoint, in one word, such as "weights".
    message: names the file, the fault, and what is accepted.
    """

    part: str
    message: str


@dataclass(slots=True)
class Report:
    """Everything that a check has found.

    name: the name that was checked.
    folder: the checkpoint's folder.
    errors: reasons why the folder does not load, or cannot answer a question about an image.
    warnings: things that a user should know; the folder loads.
    unchecked: parts that were not checked, each with the reason.
    facts: figures of the model by name. Bytes and counts are integers; "videos" is a bool.
    """

    name: str
    folder: Path
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    facts: dict[str, str | int] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Whether nothing was found that prevents the checkpoint from being served."""
        return not self.errors

    def add_error(self, part: str, message: str) -> None:
        self.errors.append(Finding(part, message))

    def add_warning(self, part: str, message: str) -> None:
        self.warnings.append(Finding(part, message))

    def skip(self, part: str, reason: str) -> None:
        """Note that a part was not checked."""
        self.unchecked.append(Finding(part, reason))

    def attempt(self, part: str, work: Callable[[], T]) -> T | None:
        """Return the result of a step of loading. If it fails, note an error of the part and return None."""
        try:
            return work()
        except FoveaError as error:
            self.add_error(part, error.message)
        except Exception as error:  # noqa: BLE001 - a library failed, so loading would fail, too
            self.add_error(part, f"{type(error).__name__}: {str(error)[:500]}")
        return None

    def as_json(self) -> dict[str, Any]:
        """The report as an object for programs."""
        lists = {
            name: [{"part": item.part, "message": item.message} for item in items]
            for name, items in (
                ("errors", self.errors),
                ("warnings", self.warnings),
                ("unchecked", self.unchecked),
            )
        }
        return {
            "name": self.name,
            "folder": str(self.folder),
            "loads": self.loads,
            **lists,
            "facts": self.facts,
        }


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors that a checkpoint has, as far as it can be told.

    files: name and tensors of each file. Of a file that is not there, only the names are known.
    whole: whether the names of all tensors are known.
    """

    files: tuple[tuple[str, Sequence[TensorEntry]], ...]
    whole: bool = True

    @property
    def entries(self) -> Iterator[TensorEntry]:
        for _, entries in self.files:
            yield from entries


def read_stored(folder: Path, report: Report, refused: Sequence[Path]) -> StoredTensors | None:
    """Read all headers, and report files that are missing or broken. Returns None if there are no names.

    refused: files that must not be opened.
    """
    if any(path.name == "model.safetensors.index.json" for path in refused):
        return None
    shards = report.attempt(PART, lambda: find_shards(folder))
    if shards is None:
        return None
    _report_missing(folder, shards, report)
    files: list[tuple[str, Sequence[TensorEntry]]] = []
    indexed: dict[str, list[TensorEntry]] = {}
    for name, file in shards.index.items():
        indexed.setdefault(file, []).append(TensorEntry(name))
    whole = True
    for path in shards.files:
        content = None if path in refused else report.attempt(PART, lambda path=path: read_entries(path))  # type: ignore[misc]
        if content is not None:
            files.append((path.name, content[0]))
        elif path.name in indexed:
            files.append((path.name, indexed[path.name]))
        else:
            whole = False
    files += [(name, indexed[name]) for name in shards.missing]
    unknown = sum(entry.shape is None for _, entries in files for entry in entries)
    if unknown:
        report.skip(
            PART,
            f"shapes and types of {unknown} tensors were not checked, only the names that the index gives "
            "them: their files are not there, or cannot be read",
        )
    return StoredTensors(tuple(files), whole)


def _report_missing(folder: Path, shards: Shards, report: Report) -> None:
    if shards.missing:
        count = len(shards.files) + len(shards.missing)
        names = [name[:100] for name in shards.missing[:3]]
        report.add_error(PART, f"{folder}: {len(shards.missing)} of {count} shards are missing: {names}")


def group_quantized(folder: Path, stored: StoredTensors, report: Report) -> StoredTensors:
    """Make one entry of all tensors of each quantized weight, and report tensors that do not fit each other.

    Tensors of a few numbers are read, no weights. Raises CheckpointError or UnsupportedModel for a way to
    quantize that is not known.
    """
    family = find_family(folder)
    if family is None:
        return stored
    from fovea.engine.models.quantized.base import regroup

    readers: dict[int, SafetensorsWeights] = {}

    def read(file: int, entry: TensorEntry) -> torch.Tensor:
        if file not in readers:
            readers[file] = SafetensorsWeights([folder / stored.files[file][0]])
        tensor = torch.empty(entry.shape or (), dtype=STORED_TYPES[entry.dtype])
        readers[file].read(0, entry, tensor)
        return tensor

    try:
        grouped = regroup(stored.files, family, read)
    finally:
        for reader in readers.values():
            reader.close()
    for message in group_problems(grouped.problems)[:MOST_GROUPS]:
        report.add_error(PART, message)
    kept = [weight for weight in grouped.weights.values() if weight.coded]
    report.facts |= {
        "quantization": family.title,
        "quantized_weights": len(grouped.weights),
        "kept_weights": len(kept),
        "kept_bytes": sum(weight.nbytes for weight in kept),
        "kept_parameters": sum(prod(weight.shape) for weight in kept),
    }
    return StoredTensors(grouped.files, stored.whole)


def check_tensors(stored: StoredTensors, model: VisionLanguageModel, report: Report) -> Assignment:
    """Compare the stored tensors with those of the model, and report what does not fit."""
    targets = {name: tuple(tensor.shape) for name, tensor in model.checkpoint_targets()}
    assignment = assign(stored.files, targets, model.ignored, model.renames, model.fused_tensors())
    problems = assignment.problems
    if not stored.whole:
        problems = tuple(problem for problem in problems if problem.kind != "missing")
        report.skip(PART, "which tensors are missing: a file cannot be read, and there is no index")
    messages = group_problems(problems)
    for message in messages[:MOST_GROUPS]:
        report.add_error(PART, message)
    if len(messages) > MOST_GROUPS:
        report.add_error(PART, f"{len(messages) - MOST_GROUPS} more kinds of tensors do not fit")
    return assignment


def group_problems(problems: Sequence[Problem]) -> list[str]:
    """Return a message for each kind of problem. Tensors whose names differ by numbers alone share one."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        key = problem.kind, _NUMBER.sub("N", problem.name), problem.text
        groups.setdefault(key, []).append(problem)
    return [
        str(group[0]) if len(group) == 1 else _describe(kind, pattern, text, group)
        for (kind, pattern, text), group in groups.items()
    ]


def _describe(kind: str, pattern: str, text: str, group: Sequence[Problem]) -> str:
    """The message of several tensors. kind, pattern, text: what they have in common."""
    what = _PLURAL.get(kind) or text.replace("has ", "have ", 1)
    numbers = [int(_NUMBER.findall(problem.name)[0][:9]) for problem in group if _NUMBER.search(problem.name)]
    span = f", N from {min(numbers)} to {max(numbers)}" if numbers else ""
    return f"{len(group)} tensors {pattern[:300]!r}{span} {what}"


def check_processors(checkpoint: Checkpoint, config: Any, report: Report) -> Processors | None:
    """Build the processors of images and videos, and plan an image."""
    built = report.attempt("images", lambda: checkpoint.processors(config))
    if built is None:
        return None
    processor, videos = built
    if not processor.capabilities.images:
        report.facts |= {"images": False, "videos": False}
        return built
    plan = report.attempt("images", lambda: processor.plan(WIDTH, HEIGHT, PixelBudget()))
    if plan is not None:
        report.facts["image_tokens"] = plan.tokens
    report.facts["videos"] = videos is not None
    return built if plan is not None else None


def check_prompt(
    checkpoint: Checkpoint,
    config: Any,
    model: VisionLanguageModel | None,
    processors: Processors | None,
    report: Report,
) -> None:
    """Load the tokenizer, and make prompts with one image and with two.

    model, processors: None: there is none, because its part of the checkpoint is faulty.
    """

    def work() -> None:
        tokenizer = checkpoint.tokenizer(config)
        if model is None:
            return
        _check_ids(checkpoint.path, tokenizer, model, report)
        if processors is not None:
            _check_template(_builder(tokenizer, model, *processors), tokenizer, report)

    report.attempt("prompt", lambda: run_within(SECONDS, work))
    if model is None or processors is None:
        report.skip("prompt", "the chat template: the model or the image processor has errors")


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its exception. Raises CheckpointError if it takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            errors.append(error)

    # Nothing can stop a template. A daemon thread does not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CheckpointError(f"the tokenizer or the chat template did not end within {seconds:g} seconds")
    if errors:
        raise errors[0]
    return results[0]


def _builder(
    tokenizer: ChatTokenizer, model: VisionLanguageModel, images: ImageProcessor, videos: QwenVideos | None
) -> PromptBuilder:
    support = None
    if videos is not None and model.video_token_id is not None:
        support = videos, model.video_token_id
    return PromptBuilder(tokenizer, images, model.image_token_id, support)


def _check_template(builder: PromptBuilder, tokenizer: ChatTokenizer, report: Report) -> None:
    if not tokenizer.has_template:
        report.add_warning(
            "prompt", "there is no chat template: only text prompts work, or --chat-template FILE"
        )
        return
    image = Image("0" * 64, WIDTH, HEIGHT, bytes(WIDTH * HEIGHT * 3))
    for count in (1, 2) if builder.processor.capabilities.images else (0,):
        images = (ImagePart(image),) * count
        builder.build(ChatPrompt((Message("user", (*images, TextPart("What is in the picture?"))),)))


def _check_ids(folder: Path, tokenizer: ChatTokenizer, model: VisionLanguageModel, report: Report) -> None:
    """Check that the ids of tokens are rows of the embedding table."""
    config = model.decoder.config
    choices, rows = config.vocab_size, config.vocab_size + config.extra_embeddings
    for name in ("image_token_id", "video_token_id"):
        token: int | None = getattr(model, name)
        if token is not None and token >= rows:
            report.add_error(
                "prompt", f"{folder}/config.json: {name} is {token}; accepted: 0 to {rows - 1} (vocab_size)"
            )
    if tokenizer.vocab_size > rows:
        report.add_warning(
            "prompt",
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {rows}: prompts with the tokens "
            f"from {rows} on are refused",
        )
    ends = sorted(tokenizer.eos_ids)
    if not any(end < choices for end in ends):
        report.add_warning(
            "prompt",
            f"no token ends an answer: eos_token_id is {ends[:5]}, and the model has {choices} tokens; "
            "answers end at max_tokens",
        )


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
    known_way = True
    if (raw := stored) is not None:
        grouped = report.attempt("config", lambda: group_quantized(folder, raw, report))
        known_way, stored = grouped is not None, grouped or raw
    entries = [] if stored is None else list(stored.entries)
    known = [entry for entry in entries if entry.shape is not None]
    dtype = common_dtype(known) if known else _declared_dtype(config)
    untie_own_head(config, (entry.name for entry in entries))
    model = report.attempt("config", lambda: build_model(folder, config, torch.device("meta"), dtype))
    if model is None:
        return None
    _state_model(config, model, dtype, report)
    if not known_way:
        report.skip(
            "weights", "the names of tensors: the way in which the checkpoint is quantized is not known"
        )
    elif stored is not None:
        assignment = check_tensors(stored, model, report)
        report.facts["unused_tensors"] = len(assignment.ignored)
    return model


def _declared_dtype(config: Any) -> torch.dtype:
    """The type that config.json names; float32 if it names none that is a float."""
    for part in (config, text_config(config)):
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


def shape_of_folder(folder: Path, name: str = "") -> ModelShape:
    """Return the shape of a checkpoint's model in seconds. The folder needs config.json; weights may lack.

    folder: the folder, or a GGUF file.
    name: name of the shape; "": the folder's.

    Raises CheckpointError or UnsupportedModel.
    """
    gguf = find_gguf(folder)
    config = read_config(folder) if gguf is None else gguf.config()
    untie_own_head(config, _stored_names(folder) if gguf is None else ())
    return shape_of_config(folder, config, name or served_name(str(folder)))


def shape_of_config(folder: Path, config: Any, name: str) -> ModelShape:
    """Return the shape of a configuration.

    folder: where it was read, for errors.
    config: a transformers configuration, see `load.read_config`.
    name: name of the shape.

    Raises CheckpointError or UnsupportedModel.
    """
    # A 16-bit type, so that those numbers that stay float32 can be told from the others.
    model = build_model(folder, config, torch.device("meta"), torch.bfloat16)
    return shape_of(model, name, config.model_type)


def _stored_names(folder: Path) -> Iterator[str]:
    """Names of the weights of those files that are there, and of the index."""
    try:
        shards = find_shards(folder)
        family = find_family(folder)
    except UnsupportedModel:
        family = None
    except CheckpointError:
        return
    names = [*shards.index]
    for path in shards.files:
        names += [entry.name for entry in read_entries(path)[0]]
    yield from names if family is None else (family.split(name)[0] for name in names)
