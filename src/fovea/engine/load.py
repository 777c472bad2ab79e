"""Loads a checkpoint from a folder or the hub into a model that is ready to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fovea.core.errors import CheckpointError, ConfigError, FoveaError
from fovea.core.names import BUNDLED, bundled_model, served_name
from fovea.core.types import ModelInfo
from fovea.dialects.dialect import Dialect, detect
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.config.model import CompileModes
from fovea.engine.files import check_bounds, check_folder, read_json
from fovea.engine.layers.layer import CrossLayer
from fovea.engine.layers.linear import Embedding, use_kernels
from fovea.engine.layers.ranks import ALONE, Ranks, for_ranks
from fovea.engine.models import internvl
from fovea.engine.models.base import VisionLanguageModel
from fovea.engine.models.bundled import PlainConfig, is_bundled
from fovea.engine.models.compile import check_compile, compile_modules, describe_site, find_engines, install
from fovea.engine.models.gguf.checkpoint import find_gguf
from fovea.engine.models.gguf.reader import SUFFIX
from fovea.engine.models.look_heads import Head, read_heads
from fovea.engine.models.quantized import log_notes, open_weights
from fovea.engine.models.registry import architecture, architecture_of, build
from fovea.engine.models.side_files import build_processors, default_sampling
from fovea.engine.models.stored import ORIGINAL_NAME, StoredWeights, common_dtype, trim_memory
from fovea.engine.models.targets import FusedTensor, canonical
from fovea.engine.models.tokenizer import load_tokenizer, reason
from fovea.engine.models.weights import NOTHING, RECIPES, Packer, load_weights
from fovea.engine.reduce.probe import probe_modules
from fovea.engine.request.tokenizer import ChatTokenizer
from fovea.engine.tiers import fingerprint
from fovea.engine.vision.processor.base import ImageProcessor
from fovea.engine.vision.processor.pixels import in_type
from fovea.engine.vision.processor.settings import stated_type
from fovea.engine.vision.processor.video import QwenVideos
from fovea.kernels.choose import bind_threads, choose, described, results_depend_on
from fovea.kernels.native import pictures
from fovea.kernels.native.build import library
from fovea.kernels.native.instruction_sets import has_bf16_units
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.shared import keep_parameters

log = logging.getLogger("fovea.engine")
DEQUANTIZE = "dequantize"
"""Value of the setting `quantization` that turns quantized weights into plain ones."""
TRIM_BYTES = 64 * MIB
"""Size of a checkpoint from which memory is returned after loading: to look for it takes time."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory, ready to run.

    model, tokenizer, processor: its parts.
    info: name and figures for clients.
    fingerprint: digest of everything that decides encoder outputs, for the cache on disk (`tiers/disk.py`);
        empty without that cache.
    videos: plans videos; None: the model takes none.
    look_heads: the attention heads that look for what a question is about; None: none were chosen.
    path: the checkpoint's folder or file.
    """

    model: VisionLanguageModel
    tokenizer: ChatTokenizer
    processor: ImageProcessor
    info: ModelInfo
    fingerprint: str = ""
    videos: QwenVideos | None = None
    look_heads: tuple[Head, ...] | None = None
    path: Path = Path()


def resolve(name: str, revision: str = "", *, download: bool = True) -> Path:
    """Return a checkpoint's folder: of the bundled model, of a local path, or of a download from the hub.

    Of a GGUF file it is the file.

    revision: branch, tag or commit on the hub; "": its main branch.
    download: whether files that are not in the local cache are downloaded.
    Raises CheckpointError if the name is none of these, or if the download fails; ConfigError for a revision
    of a folder.
    """
    path = bundled_model() if name == BUNDLED else Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == SUFFIX):
        if revision:
            raise ConfigError(
                f"revision is {revision!r}, but {name!r} is a {'folder' if path.is_dir() else 'file'}; "
                "revisions are those of hub ids "
                "(owner/name)",
                param="revision",
            )
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"{name!r} is neither a folder, a GGUF file (*{SUFFIX}), a hub id (owner/name) nor {BUNDLED!r}"
        )
    from huggingface_hub import is_offline_mode, snapshot_download

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=f"{ORIGINAL_NAME}*.safetensors",
                # huggingface_hub 1.33 asks the hub about a commit offline, too, unless it is told not to.
                local_files_only=not download or is_offline_mode(),
            )
        )
    except Exception as error:
        wanted = f"{name!r} at revision {revision!r}" if revision else repr(name)
        if not download:
            raise CheckpointError(
                f"{wanted} is not on this machine, and nothing is downloaded here; accepted: a folder, or a "
                f"model that was downloaded before, as by `hf download {name}`"
            ) from error
        raise CheckpointError(f"{wanted} could not be downloaded: {reason(error)}") from error
    log.info("%s: revision %s is commit %s", name, revision or "main", folder.name)
    return folder


class Checkpoint(Protocol):
    """The files of a model, whatever their format.

    path: the folder or the file, for messages.
    images_need: see `ModelInfo`.
    """

    @property
    def path(self) -> Path: ...

    @property
    def images_need(self) -> str: ...

    def config(self) -> Any:
        """Return the configuration as transformers reads it. Raises CheckpointError or UnsupportedModel."""
        ...

    def weights(self, config: Any) -> StoredWeights:
        """Return the weights. Raises CheckpointError or UnsupportedModel."""
        ...

    def tokenizer(
        self,
        config: Any,
        *,
        template: str | None = None,
        dialect: Callable[[str | None], Dialect] = detect,
    ) -> ChatTokenizer:
        """See `models.tokenizer.load_tokenizer`."""
        ...

    def processors(self, config: Any) -> tuple[ImageProcessor, QwenVideos | None]:
        """See `build_processors`."""
        ...

    def default_sampling(self) -> dict[str, float | int]:
        """Return the checkpoint's values for parameters of sampling that a request does not set."""
        ...

    def look_heads(self, known: Iterable[Head]) -> tuple[Head, ...] | None:
        """See `models.look_heads.read_heads`."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint in the files that transformers has: a `Checkpoint`."""

    path: Path
    images_need: str = ""

    def config(self) -> Any:
        return read_config(self.path)

    def weights(self, config: Any) -> StoredWeights:
        return open_weights(self.path, config)

    def tokenizer(
        self,
        config: Any,
        *,
        template: str | None = None,
        dialect: Callable[[str | None], Dialect] = detect,
    ) -> ChatTokenizer:
        return load_tokenizer(self.path, config, template=template, dialect=dialect)

    def processors(self, config: Any) -> tuple[ImageProcessor, QwenVideos | None]:
        return build_processors(self.path, config)

    def default_sampling(self) -> dict[str, float | int]:
        return default_sampling(self.path)

    def look_heads(self, known: Iterable[Head]) -> tuple[Head, ...] | None:
        return read_heads(self.path, known)


def open_checkpoint(path: Path, mmproj: str = "") -> Checkpoint:
    """Return the checkpoint in a folder, or in a GGUF file.

    mmproj: the file with the vision tower of a GGUF file; "": see `models.gguf.checkpoint.find_gguf`.

    Raises CheckpointError, UnsupportedModel or ConfigError.
    """
    found = find_gguf(path, mmproj)
    if found is not None:
        return found
    check_folder(path)
    return Folder(path)


def load_model(
    name: str,
    settings: EngineConfig,
    *,
    chat_template: str | None = None,
    layers: bool = True,
    ranks: Ranks = ALONE,
) -> LoadedModel:
    """Load a checkpoint.

    name: a folder, a hub id, or the name of the bundled model.
    settings: device, type, kernels, quantization and compilation.
    chat_template: a Jinja template that replaces the checkpoint's own.
    layers: whether the decoder's layers are loaded. Without them it cannot compute anything.
    ranks: the processes that compute the decoder together, this one as the driver. It loads its share.
    Raises CheckpointError, UnsupportedModel or ConfigError, naming the file, the feature or the setting.
    """
    checkpoint = open_checkpoint(resolve(name, settings.model.revision), settings.model.mmproj)
    config = checkpoint.config()
    entry = architecture_of(config)
    stored = checkpoint.weights(config)
    entries = [entry for _, entries in stored.files for entry in entries]
    untie_own_head(config, (entry.name for entry in entries))
    device = pick_device(settings.model.device)
    dtype = pick_dtype(settings.model.dtype, device, common_dtype(entries), settings.model.kernels)
    as_stored = settings.model.quantization == NOTHING
    quantization = _quantization(settings.model.quantization, checkpoint.path, stored)
    settings.check_on(described(settings.model.kernels, device, dtype), str(dtype).removeprefix("torch."))
    model = build_model(checkpoint.path, config, device, dtype, ranks)
    ranks.attach(model.decoder, model.head)
    model.decoder.balance_keys(settings.kv.kv_dtype != "auto")
    # An engine that only encodes needs no layers, but those with cross-attention make its outputs.
    layers = layers and (settings.peers.role != "encode" or bool(model.decoder.config.cross_layers))
    ignored = (*model.ignored, *ranks.skipped(model.whole)) if layers else _without_layers(model)
    kernels = choose(settings.model.kernels, device, dtype, model.decoder.config.attention_heads)
    if settings.model.pin_threads and isinstance(kernels, NativeKernels):
        bind_threads(kernels)
    modes = CompileModes.of(settings.model.compile)
    check_compile(modes, kernels, quantization)
    parameters = count_parameters(
        model if ranks is ALONE else build_model(checkpoint.path, config, torch.device("meta"), dtype)
    )
    recipe = RECIPES[NOTHING if as_stored else quantization]
    built = find_engines(settings.model.encoder_engines, checkpoint.path, model, quantization)
    # The fingerprint is that of plain weights. It is computed only for a cache on disk: a large encoder takes
    # a second.
    on_disk = bool(settings.outputs.embed_disk_dir)
    heads = checkpoint.look_heads(model.whole.look_heads)
    deciding = [*model.encoder_modules(), *(probe_modules(model, heads) if on_disk else ())]
    packer = Packer(model, kernels, recipe, later=deciding if on_disk or built else (), as_stored=as_stored)
    _load(stored, model, ignored, packer, model.fused_tensors())
    fingerprint_value = ""
    if built:
        install(model, built, describe_site(model, entry.name))
    if on_disk:
        details = (
            entry.name,
            str(dtype),
            results_depend_on(kernels),
            quantization,
            model.engines.digest,
            *(() if settings.kv.kv_dtype == "auto" else ("balanced keys",)),  # probes of images read keys
        )
        fingerprint_value = fingerprint(deciding, *details)
    packer.pack_rest()
    keep_parameters([model])  # before kernels take addresses
    model.finish_loading(kernels, recipe.head, parameters)
    compile_modules(model, modes)
    ranks.meet(device)
    if stored.nbytes >= TRIM_BYTES:
        trim_memory()
    tokenizer = checkpoint.tokenizer(config, template=chat_template, dialect=settings.model.dialect)
    processor, videos = checkpoint.processors(config)
    values = str(dtype).removeprefix("torch.")
    processor, videos = in_type(processor, values), videos and in_type(videos, values)
    pictures.kernels()  # may compile them, for which no image should wait
    info = ModelInfo(
        name=served_name(name),
        architecture=entry.name,
        parameters=parameters,
        dtype=values,
        quantization=quantization,
        device=str(device),
        max_context=model.decoder.config.max_positions,
        vocab_size=model.decoder.config.vocab_size,
        extra_embeddings=model.decoder.config.extra_embeddings,
        created=int(time.time()),
        default_sampling=checkpoint.default_sampling(),
        input_modalities=("text", *(("image",) if entry.images else ()), *(("video",) if videos else ())),
        images_need=checkpoint.images_need,
        fingerprint=fingerprint_value,
        tool_format=tokenizer.dialect.tools.name if tokenizer.dialect.tools else "",
        reasons=tokenizer.dialect.reasoning is not None,
    )
    return LoadedModel(model, tokenizer, processor, info, fingerprint_value, videos, heads, checkpoint.path)


def load_share(name: str, settings: EngineConfig, ranks: Ranks) -> tuple[VisionLanguageModel, torch.device]:
    """Load the share of a worker: some layers of a model, without a tower and an embedding table.

    Returns the model, and its device. Raises as `load_model`.
    """
    checkpoint = open_checkpoint(resolve(name, settings.model.revision), settings.model.mmproj)
    config = checkpoint.config()
    stored = checkpoint.weights(config)
    entries = [entry for _, entries in stored.files for entry in entries]
    untie_own_head(config, (entry.name for entry in entries))
    device = pick_device(settings.model.device)
    dtype = pick_dtype(settings.model.dtype, device, common_dtype(entries), settings.model.kernels)
    quantization = _quantization(settings.model.quantization, checkpoint.path, stored)
    model = build_model(checkpoint.path, config, device, dtype, ranks)
    ranks.attach(model.decoder, model.head)
    fused = model.fused_tensors()
    _keep_layers(model)
    model.decoder.balance_keys(settings.kv.kv_dtype != "auto")
    kernels = choose(settings.model.kernels, device, dtype, model.decoder.config.attention_heads)
    as_stored = settings.model.quantization == NOTHING
    recipe = RECIPES[NOTHING if as_stored else quantization]
    packer = Packer(model, kernels, recipe, as_stored=as_stored)
    _load(stored, model, (*model.ignored, *ranks.skipped(model.whole)), packer, fused)
    use_kernels(model, kernels)
    model.decoder.use_stack(kernels, whole=False)
    if stored.nbytes >= TRIM_BYTES:
        trim_memory()
    return model, device


def _keep_layers(model: VisionLanguageModel) -> None:
    """Drop everything but the layers of the decoder, and the head if this process has a part of it."""
    for name in [name for name, _ in model.named_children() if name not in ("decoder", "head")]:
        delattr(model, name)
    decoder, hidden = model.decoder, model.whole.hidden
    table = decoder.embed_tokens.weight
    with torch.device(table.device):
        decoder.embed_tokens = Embedding(0, hidden).to(table.dtype)
    if not model.head.lm_head.out_features:
        model.head.tied = True  # so that no tensors are expected for it
    decoder.per_layer = None
    for layer in decoder.layers:
        if isinstance(layer, CrossLayer):  # the driver computes keys and values of images
            for name in ("k_proj", "v_proj", "k_norm"):
                delattr(layer.cross_attn, name)


def _load(
    stored: StoredWeights,
    model: VisionLanguageModel,
    ignored: Iterable[str],
    packer: Packer,
    fused: Mapping[str, FusedTensor],
) -> None:
    """Load the weights, or this process' parts of them."""
    owned = ("decoder.layers.", "lm_head.") if model.ranks.rank else ("",)
    # Nothing here may hold a tensor: those that are packed must give their memory back.
    names = [name for name, _ in model.checkpoint_targets() if name.startswith(owned)]
    cuts = {name: cut for name in names if (cut := model.ranks.cut(model.whole, name)) is not None}
    targets = ((name, tensor) for name, tensor in model.checkpoint_targets() if name.startswith(owned))
    count = load_weights(stored, targets, ignored, packer, model.renames, fused, cuts)
    if model.ranks is not ALONE:
        log.info("rank %d has read %.1f MiB of %.1f", model.ranks.rank, count / MIB, stored.nbytes / MIB)


def _without_layers(model: VisionLanguageModel) -> tuple[str, ...]:
    """Take the layers from a decoder. Returns which tensors of the checkpoint are not loaded then."""
    model.decoder.layers = torch.nn.ModuleList()
    return (*model.ignored, r"^decoder\.layers\.")


def _quantization(setting: str, folder: Path, stored: StoredWeights) -> str:
    """Return how the model's weights are quantized, for users."""
    if setting == NOTHING:
        log_notes(folder, stored)
        return stored.quantization or NOTHING
    return NOTHING if setting == DEQUANTIZE else setting


def read_config(folder: Path) -> Any:
    """Return a configuration as transformers reads it. Raises CheckpointError or UnsupportedModel."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    content = read_json(folder / "config.json")
    kind = stated_type(content)
    architecture(kind)
    check_bounds(content, folder / "config.json")
    if is_bundled(folder):
        return PlainConfig.of(content)
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if kind == internvl.CHAT_MODEL_TYPE:
            config = internvl.chat_config(content, folder)
        elif kind != content.get("model_type"):
            config = CONFIG_MAPPING[kind].from_dict({**content, "model_type": kind})
        else:
            # Code that a checkpoint brings along is never run.
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        defaults_too = config.to_dict()
    except FoveaError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}/config.json cannot be used: {reason(error)}") from error
    check_bounds(defaults_too, folder / "config.json")
    return config


def pick_device(name: str) -> torch.device:
    """Return the device of a name; "auto": CUDA if there is any, else the CPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device", param="device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, stored: torch.dtype, kernels: str = "auto") -> torch.dtype:
    """Return the torch type of the model.

    name: name of a type. "auto" on CUDA: the checkpoint's own type. "auto" on a CPU: bfloat16 for a
        checkpoint of 16-bit floats if Fovea's C++ kernels run here or the CPU has BF16 instructions, else
        float32.
    stored: the checkpoint's type.
    kernels: the configured kernels, by name.
    """
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if stored not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.type == "cuda":
        return stored
    # Without BF16 instructions oneDNN emulates bf16, and float32 is faster. The C++ kernels do not need them.
    native = kernels in ("auto", "native") and library() is not None
    return torch.bfloat16 if native or has_bf16_units() else torch.float32


def untie_own_head(config: Any, names: Iterable[str]) -> None:
    """Note in a configuration that the checkpoint has a language head of its own.

    names: names of the checkpoint's tensors.

    Mistral 3's files do not say whether the head is tied to the embedding table, and transformers' default is
    that it is. transformers, too, goes by the tensors then.
    """
    if getattr(config, "tie_word_embeddings", False) and "lm_head.weight" in map(canonical, names):
        config.tie_word_embeddings = False


def build_model(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, ranks: Ranks = ALONE
) -> VisionLanguageModel:
    """Build a model with uninitialised weights. On the device "meta" its tensors have no storage.

    ranks: the processes that compute the decoder together.

    Raises CheckpointError or UnsupportedModel.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), for_ranks(ranks):
            return build(config).eval()
    except FoveaError:
        raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder}/config.json: no model can be built of its values: {reason(error)}"
        ) from error
    finally:
        torch.set_default_dtype(before)


def count_parameters(model: VisionLanguageModel) -> int:
    """Number of the parameters that a checkpoint holds."""
    return sum(tensor.numel() for _, tensor in model.checkpoint_targets())
