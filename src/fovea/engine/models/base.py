"""What the runner may ask of a model, whatever its architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fovea.engine.layers.decoder import Decoder, DecoderConfig, LanguageHead
from fovea.engine.layers.linear import checkpoint_targets, use_kernels
from fovea.engine.vision.built.engines import EncoderEngines
from fovea.engine.vision.built.static import StaticEncoder
from fovea.engine.vision.features import VisualFeatures
from fovea.engine.vision.processor.base import ProcessedImage, VisualPlan
from fovea.engine.vision.shape import VisualShape
from fovea.engine.vision.slices import Slices, finished
from fovea.kernels.quantize import Format
from fovea.kernels.torch.kernels import PLAIN, TorchKernels

TIED_HEAD_PACK_SHARE = 0.15


class VisionLanguageModel(nn.Module, ABC):
    """A vision tower and a decoder.

    image_token_id: the id that image spans in a prompt consist of. video_token_id: the same for videos, None for
        models that take none.
    merge: patches per side of a visual token where positions are three-dimensional (M-RoPE), else None.
    ignored: regular expressions of checkpoint names (after `names.canonical`) that this model has no use for.
    """

    ignored: tuple[str, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        image_token_id: int,
        *,
        merge: int | None,
        video_token_id: int | None = None,
    ) -> None:
        super().__init__()
        self.decoder = Decoder(config)
        self.head = LanguageHead(config)
        self.image_token_id = image_token_id
        self.video_token_id = video_token_id
        self.merge = merge
        self.kernels = PLAIN
        self.engines = EncoderEngines()

    @abstractmethod
    def encode_slices(self, image: ProcessedImage) -> Slices[VisualFeatures]:
        """Visual tokens of one image, a slice at a time. Deterministic; never looks at other images."""

    def encode(self, image: ProcessedImage) -> VisualFeatures:
        return finished(self.encode_slices(image))

    def static_encoder(self) -> StaticEncoder | None:
        """The vision tower as something that can be built for a grid; None: there is no such thing."""
        return None

    @abstractmethod
    def visual_shape(self, plan: VisualPlan) -> VisualShape:
        """How much the encoder has to compute for an image of that plan."""

    @abstractmethod
    def projector_parts(self) -> list[nn.Module]:
        """What makes the tower's rows as wide as the decoder's."""

    def visual(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which ids of a prompt the encoder's output takes the places of."""
        places: NDArray[np.bool_] = ids == self.image_token_id
        return places if self.video_token_id is None else places | (ids == self.video_token_id)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden) decoder output to float32 (rows, vocabulary)."""
        return self.head(self.decoder.norm(hidden))  # type: ignore[no-any-return]

    def checkpoint_targets(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, storage) of every tensor that a checkpoint must bring."""
        for name, tensor in checkpoint_targets(self):
            if name.startswith("head.lm_head."):
                if not self.head.tied:
                    yield name.removeprefix("head."), tensor
            else:
                yield name, tensor

    def checkpoint_names(self, path: str, layer: nn.Module) -> list[str]:
        """What `checkpoint_targets` calls the tensors of the layer at that path."""
        return [name.removeprefix("head.") for name, _ in checkpoint_targets(layer, path + ".")]

    def finish_loading(self, kernels: TorchKernels, head: Format | None, parameters: int) -> None:
        """Weights are in, and layers packed: tie the head, in its format, and let every layer take the machine's kernels."""
        self.kernels = kernels
        if self.head.tied:
            table = self.decoder.embed_tokens
            small = table.weight.numel() <= TIED_HEAD_PACK_SHARE * parameters
            self.head.tie(table, kernels, head, copy=small)
        use_kernels(self, kernels)
        self.decoder.use_stack(kernels)

    def encoder_parts(self) -> list[nn.Module]:
        """What is between pixels and visual tokens."""
        return [part for name, part in self.named_children() if name not in ("decoder", "head")]

    @property
    def visual_token_bytes(self) -> int:
        """What a visual token takes in memory between encoder and decoder."""
        return self.decoder.config.hidden * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.embed_tokens.weight.device

    def pixels(self, image: ProcessedImage, name: str = "pixel_values") -> Tensor:
        """One of the processor's arrays as a tensor of the model's type and place."""
        array = torch.from_numpy(image.arrays[name])
        if self.device.type == "cuda":
            # A copy from other memory would wait for all that the stream has to do before it.
            array = array.pin_memory().to(self.device, non_blocking=True)
        return array.to(self.device, self.dtype)
