"""Hands values of this engine over to others, and takes theirs in. For the engine's thread, between steps.

What travels are the bytes as they lie in memory: pages of keys and values, quantized or not, and the states
of layers that have some. Encoder outputs, which differ in shape, travel in the safetensors format.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fovea.core.errors import InvalidRequest
from fovea.engine.cache.embeddings import EmbeddingCache
from fovea.engine.execute.runner import Runner
from fovea.engine.kv.blocks import GONE
from fovea.engine.kv.manager import KVManager
from fovea.engine.peers.layout import Layouts
from fovea.engine.peers.values import Value, output_value, prefix_values
from fovea.engine.sequence import Sequence as TokenSequence
from fovea.engine.transfer.connector import Connector, Offer, TransferFailed
from fovea.engine.vision.encoding import VisualFeatures
from fovea.kernels.pages import KVPool

log = logging.getLogger("fovea.engine")
PLACE_BYTES, HEADER_BYTES = 8, 1 << 16
"""Of an output: of a token's place, and of everything that does not grow with its tokens."""
CREATED = "created"
"""Name of the tensor with the time of encoding, in seconds of `time.time`."""


class Handover:
    """The memory of one engine, as the source and the target of values.

    layouts: names of what engines must have in common.
    divided: whether keys and values lie in parts, on several devices. Then only encoder outputs travel.
    connector: what values of this engine are offered by.
    adopted: number of values of peers that were taken in.
    """

    def __init__(
        self,
        layouts: Layouts,
        runner: Runner,
        kv: KVManager,
        embeddings: EmbeddingCache[VisualFeatures],
        connector: Connector,
        *,
        divided: bool = False,
    ) -> None:
        self.layouts = layouts
        self.divided = divided
        self.kv = kv
        self.embeddings = embeddings
        self.adopted = 0
        self._told = False
        self._memory = runner.memory
        self._model = runner.model
        self.connector = connector

    def export(self, seq: TokenSequence, first: int | None, outputs: Iterable[tuple[str, int]]) -> Export:
        """Return what offers the results of a sequence as they become ready.

        first: see `Offering`. outputs: keys and rows of the encoder outputs that are offered.
        """
        values = [output_value(self.layouts.encoder, key, rows) for key, rows in outputs]
        if first is not None:
            values += prefix_values(self.layouts.decoder, self.kv, seq, first)
        return Export(self, values)

    def read(self, value: Value, seq: TokenSequence) -> list[memoryview] | None:
        """Return the bytes of a value, in pieces; None: it is not ready yet."""
        if value.kind == "output":
            known = value.key in self.embeddings
            return [memoryview(_write_output(self.embeddings.get(value.key)))] if known else None
        found = self._find(value, seq)
        return None if found is None else [_bytes(tensor) for tensor in found]

    def offer(self, value: Value, pieces: Sequence[memoryview]) -> Mapping[str, Any] | None:
        """Offer a value. Returns the offer as JSON; None: there is no room for it."""
        offer = self.connector.offer(value.name, pieces)
        if offer is None and not self._told:
            self._told = True
            log.warning("transfer_mib has no room for all results that peers wait for; they compute the rest")
        return None if offer is None else offer.to_json()

    def release(self, offers: Iterable[Mapping[str, Any]]) -> None:
        """End offers of this engine whose values were fetched. For any thread.

        Raises InvalidRequest for what is no offer.
        """
        for fields in offers:
            try:
                offer = Offer.from_json(fields)
                if offer.place == getattr(self.connector, "place", None):
                    self.connector.release(offer)
            except TransferFailed as error:
                raise InvalidRequest(str(error), param="offers") from error

    def keep(self, key: str, features: VisualFeatures) -> None:
        """Store an output of a peer, from which another one will be made."""
        self.embeddings.keep(key, features, features.nbytes, features.created_at)

    def adopt(self, seq: TokenSequence, received: Sequence[tuple[Value, bytearray]]) -> None:
        """Take in keys, values and states of a prompt, in the order of its tokens.

        What finds no free block is left out: it is computed.
        """
        for value, data in received:
            tensors = self._targets(value, seq)
            if tensors is None:
                continue
            self.adopted += 1
            first = 0
            for tensor in tensors:
                size = tensor.nbytes
                source = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=first)
                tensor.copy_(source.view(tensor.dtype).view(tensor.shape))
                first += size

    def most_bytes(self, value: Value) -> int:
        """Return how many bytes a value has at most. For any thread."""
        if value.kind != "output":
            return self._size(value)
        return value.rows * (self._model.visual_token_bytes + PLACE_BYTES) + HEADER_BYTES

    def check(self, value: Value, data: bytearray) -> VisualFeatures | None:
        """Check a value before it is taken in. Returns the features of an output. For any thread.

        Raises TransferFailed if it cannot be that value.
        """
        if value.kind != "output":
            expected = self._size(value)
            if len(data) != expected:
                raise TransferFailed(f"a {value.kind} has {len(data)} bytes; here it has {expected}")
            return None
        return self._read_output(value, data)

    def _read_output(self, value: Value, data: bytearray) -> VisualFeatures:
        try:
            named = safetensors.torch.load(bytes(data))
            created = float(named.pop(CREATED))
            if not math.isfinite(created):
                raise ValueError(f"its time is {created}")
            tensors = [named[str(number)] for number in range(len(named))]
            features = VisualFeatures.from_tensors(tensors, min(created, time.time()))
        except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError, IndexError) as error:
            raise TransferFailed(f"an encoder output cannot be read: {error}") from error
        kept = (features.embeds, *features.deepstack)
        size = sum(tensor.nbytes for tensor in kept)
        expected = value.rows * self._model.visual_token_bytes
        if size != expected or any(len(tensor) != value.rows for tensor in kept):
            raise TransferFailed(f"an encoder output has {size} bytes; {value.rows} rows have {expected}")
        if any(tensor.dtype != self._model.dtype for tensor in kept):
            raise TransferFailed(f"an encoder output is of another type than {self._model.dtype}")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in kept):
            raise TransferFailed("an encoder output has numbers that are not finite")
        if self._model.device.type != "cpu":
            moved = [tensor.to(self._model.device) for tensor in features.tensors]
            features = VisualFeatures.from_tensors(moved, features.created_at)
        return features

    def _find(self, value: Value, seq: TokenSequence) -> Sequence[Tensor] | None:
        """Return the memory of a value that the sequence has computed; None: it is not there."""
        if value.kind == "state":
            assert self.kv.states is not None
            slot = self.kv.states.slots.find(self.kv.names.at(seq, value.position))
            return None if slot is None else self._state(slot)
        index = (value.position - 1) // self.kv.block_size
        table = seq.blocks if value.kind == "block" else seq.window_blocks
        if seq.computed_tokens < value.position or index >= len(table) or table[index] == GONE:
            return None
        return [self._pool(value).pages[:, table[index]]]

    def _targets(self, value: Value, seq: TokenSequence) -> Sequence[Tensor] | None:
        """Return the memory that takes a value in; None: it is known, or nothing is free."""
        if value.kind == "state":
            slot = self.kv.adopt_state(seq, value.position)
            return None if slot is None else self._state(slot)
        block = self.kv.adopt(seq, value.position, windowed=value.kind == "window")
        return None if block is None else [self._pool(value).pages[:, block]]

    def _size(self, value: Value) -> int:
        return self._memory.state_nbytes if value.kind == "state" else self._pool(value).block_bytes

    def _pool(self, value: Value) -> KVPool:
        return self._memory.kv[value.kind == "window"]

    def _state(self, slot: int) -> list[Tensor]:
        return [tensor[slot] for layer in self._memory.states for tensor in layer]


class Export:
    """The values that a sequence still has to offer."""

    def __init__(self, handover: Handover, values: Sequence[Value]) -> None:
        self._handover = handover
        self._left = list(values)

    def take(self, seq: TokenSequence) -> list[Mapping[str, Any]]:
        """Offer what has become ready. Values without room are left out: the other engine computes them."""
        offers: list[Mapping[str, Any]] = []
        left = []
        for value in self._left:
            pieces = self._handover.read(value, seq)
            if pieces is None:
                left.append(value)
            elif (offer := self._handover.offer(value, pieces)) is not None:
                offers.append(offer)
        self._left = left
        return offers


def _write_output(features: VisualFeatures) -> bytes:
    tensors = {str(number): tensor.contiguous() for number, tensor in enumerate(features.tensors)}
    created = torch.tensor(features.created_at, dtype=torch.float64)
    data: bytes = safetensors.torch.save({**tensors, CREATED: created})
    return data


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data
