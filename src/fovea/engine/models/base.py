"""The interface of all models, whatever their architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.config import DecoderConfig
from fovea.engine.layers.decoder import Decoder, LanguageHead
from fovea.engine.layers.linear import LayerNorm, Linear, checkpoint_targets, use_kernels
from fovea.engine.layers.ranks import ALONE, current_ranks
from fovea.engine.models.targets import FusedTensor
from fovea.engine.models.text import Renames, decoder_config
from fovea.engine.vision.any_size import AnySizeTower
from fovea.engine.vision.built.engines import EncoderEngines
from fovea.engine.vision.encoding import Slices, Tiler, VisualFeatures, VisualShape, run_to_end
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.kernels.base import Kernels
from fovea.kernels.codes import Format
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.transfer import to_device
from fovea.planner.shape import Tower

if TYPE_CHECKING:
    from fovea.engine.vision.qwen import StaticQwen

TIED_HEAD_PACK_SHARE = 0.15
"""Largest share of all parameters that a tied embedding table may have for the head to be a packed copy."""


def value_tensor(array: NDArray[Any]) -> Tensor:
    """The numbers of a processor's array as a tensor, without a copy.

    uint16 are the bits of bfloat16, see `pixels.Values`.
    """
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


class MLPProjector(nn.Module):
    """Two linear maps with an activation between them, after a norm in some models.

    The attribute names are those of checkpoints.

    width, hidden, out: width of the tower's rows, between the maps, and of the decoder.
    eps: constant of the norm; None: there is no norm.
    """

    rowwise = ("forward",)

    def __init__(
        self, width: int, hidden: int, out: int, *, bias: bool, activation: str, eps: float | None = None
    ) -> None:
        super().__init__()
        self.layer_norm = None if eps is None else LayerNorm(width, eps)
        self.linear_1 = Linear(width, hidden, bias=bias, activation=activation)
        self.linear_2 = Linear(hidden, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer_norm is None else self.layer_norm(x)
        return self.linear_2(self.linear_1(x))  # type: ignore[no-any-return]


class VisionLanguageModel(nn.Module, ABC):
    """A vision tower and a decoder.

    image_token_id: token id of the visual tokens of images in a prompt; None: the model takes no images.
    video_token_id: token id of the visual tokens of videos; None: the model takes no videos.
    merge: patches per side of a visual token if positions are three-dimensional (M-RoPE), else None.
    ignored: regular expressions of canonical checkpoint names (`targets.canonical`) that this model does not
        load.
    renames: further changes of names, see `targets.canonical`.
    ranks: the processes that compute the decoder together.
    whole: the shape of the whole decoder. That of `decoder` is the share of this process.
    """

    ignored: tuple[str, ...] = ()
    renames: Renames = ()

    def __init__(
        self, config: Any, *, decoder: DecoderConfig | None = None, merge: int | None = None
    ) -> None:
        """Build the decoder, with uninitialised weights.

        config: a transformers configuration.
        decoder: the shape of the decoder; None: as its text configuration says.
        """
        super().__init__()
        shape = decoder or decoder_config(config.text_config, tied=bool(config.tie_word_embeddings))
        self.ranks = current_ranks()
        self.whole = shape
        self.decoder = Decoder(self.ranks.share(shape))
        self.head = LanguageHead(shape, self.ranks)
        self.image_token_id: int | None = config.image_token_id if hasattr(config, "vision_config") else None
        self.video_token_id: int | None = None
        self.merge = merge
        self.kernels: Kernels = PLAIN
        self.engines = EncoderEngines()

    def expect_width(self, width: int) -> None:
        """Raise UnsupportedModel if the tower's output has another width than the decoder's input."""
        if width != self.decoder.config.hidden:
            raise UnsupportedModel(
                f"vision output {width} and decoder width {self.decoder.config.hidden} differ"
            )

    @abstractmethod
    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """Encode one image, a slice at a time. Deterministic and independent of other images."""

    def encode(self, image: ProcessedImage) -> VisualFeatures:
        """Encode one image without a pause."""
        return run_to_end(self.encode_slices(image))

    def static_encoder(self) -> StaticQwen | None:
        """Return the vision tower as an encoder that can be built ahead of time; None: it cannot be built."""
        return None

    def any_size_tower(self) -> AnySizeTower | None:
        """The vision tower, if it encodes pictures of any size; images can then be encoded by region."""
        return None

    def tiler(self) -> Tiler | None:
        """The encoder of single tiles, if the tiles of an image can be encoded one by one."""
        return None

    @abstractmethod
    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        """Count the rows that the encoder computes for an image of that plan."""

    @abstractmethod
    def tower_shape(self) -> Tower | None:
        """Return the numbers from which the rows of an image follow; None: there is no tower."""

    def projector_modules(self) -> list[nn.Module]:
        """Return the modules that turn the tower's rows into rows of the decoder's width."""
        return [self.get_submodule("projector")]

    def merged_modules(self) -> list[nn.Module]:
        """Return the tower's modules that get fewer rows than its first block: a merge comes before them."""
        return []

    def visual(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the visual tokens among the ids of a prompt: True where encoder output is the input."""
        if self.image_token_id is None:
            return np.zeros(ids.shape, np.bool_)
        mask: NDArray[np.bool_] = ids == self.image_token_id
        return mask if self.video_token_id is None else mask | (ids == self.video_token_id)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of decoder output: (rows, hidden) to float32 (rows, vocabulary)."""
        return self.head(self.decoder.norm(hidden))  # type: ignore[no-any-return]

    def checkpoint_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the canonical name and the storage of every tensor that a checkpoint must contain."""
        for name, tensor in checkpoint_targets(self):
            if name.startswith("head.lm_head."):
                if not self.head.tied:
                    yield name.removeprefix("head."), tensor
            else:
                yield name, tensor

    def fused_tensors(self) -> Mapping[str, FusedTensor]:
        """Return the checkpoint tensors that may hold several of the targets, by canonical name.

        A checkpoint has either the fused tensor or its parts.
        """
        return {}

    def checkpoint_names(self, path: str, layer: nn.Module) -> list[str]:
        """Names that `checkpoint_targets` gives to the tensors of the layer at an attribute path."""
        return [name.removeprefix("head.") for name, _ in checkpoint_targets(layer, path + ".")]

    def finish_loading(self, kernels: Kernels, head: Format | None, parameters: int) -> None:
        """Tie the head and set the kernels of all layers. All weights must be loaded and packed.

        head: format of a tied head; None: not quantized.
        parameters: number of the model's parameters. A tied plain head is packed, as a copy of the embedding
            table, only if the table is at most TIED_HEAD_PACK_SHARE of them.
        """
        self.kernels = kernels
        if self.head.tied:
            table = self.decoder.embed_tokens
            small = 0 < table.weight.numel() <= TIED_HEAD_PACK_SHARE * parameters
            self.head.tie(table, kernels, head, copy=small)
        use_kernels(self, kernels)
        self.decoder.use_stack(kernels, whole=self.ranks is ALONE)

    def encoder_modules(self) -> list[nn.Module]:
        """Return the modules between pixels and visual tokens, projector included."""
        return [module for name, module in self.named_children() if name not in ("decoder", "head")]

    @property
    def visual_token_bytes(self) -> int:
        """Bytes of the encoder's output for one visual token, DeepStack features included."""
        return self.decoder.config.hidden * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.embed_tokens.weight.device

    def array_tensor(
        self, image: ProcessedImage, name: str = "pixel_values", *, rounded: bool = True
    ) -> Tensor:
        """Return one of the processor's arrays as a tensor on the model's device.

        rounded: it gets the model's type; otherwise it keeps its own.
        """
        array = to_device(value_tensor(image.arrays[name]), self.device)
        return array.to(self.dtype if rounded else array.dtype)
