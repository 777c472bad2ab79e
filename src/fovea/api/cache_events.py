"""The messages in which engines say what their caches hold, so that routers find a warm engine.

Keys and values are told in the format of vLLM: llm-d, Dynamo and other routers read it. A message has three
frames: topic, number (8 bytes, big-endian), and a batch in msgpack: [time, [event, ...], rank]. An event is a
map whose `type` is its name. Encoder outputs have events of their own kind on a socket of their own, because
some routers refuse a whole batch that has an event that they do not know.

A router that has missed messages asks a second socket by a DEALER socket: an empty frame, and the number from
which on it needs them. Each answer has an empty frame and the three frames of a message; the number -1 with
an empty batch ends them.

Source: `vllm/distributed/kv_events.py` of vLLM, version 0.24 and later, whose events are maps.
"""

from __future__ import annotations

from typing import Any

import msgspec

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number that ends a replay."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Blocks of keys and values were cached, each the continuation of the one before.

    block_hashes: their names. parent_block_hash: name of the block before the first; None: the prompt begins.
    token_ids: the tokens of all blocks.
    block_size: tokens of each block.
    lora_id, lora_name: None, because Fovea has no LoRA.
    medium: "GPU" for memory of the device, "CPU" for host memory beside it.
    extra_keys: for each block, [name, beginning] of every image that it touches, and in the first block of a
        prompt the cache salt; None: nothing. `name` is that of renders, and `beginning` is the place of the
        image's first token minus that of the block's first one, negative if the image began earlier. A
        block's name depends on its parent, its tokens and these keys.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Blocks are no longer cached in a medium. block_hashes: their names."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """No block is cached any more, in any medium."""


class EncoderOutputStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Encoder outputs of images were cached.

    mm_hashes: their names, as in `extra_keys` of blocks and in renders.
    identities: for each, the identity of its image (64 hex digits), which is the same for every resolution
        at which the image is encoded, and for every salt.
    sizes: for each, its bytes.
    medium: "GPU" for memory of the device, "CPU" for host memory beside it.
    """

    mm_hashes: list[str]
    identities: list[str]
    sizes: list[int]
    medium: str


class EncoderOutputRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Encoder outputs are no longer cached in a medium."""

    mm_hashes: list[str]
    medium: str


class AllEncoderOutputsCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """No encoder output is cached any more, in any medium."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
OutputEvent = EncoderOutputStored | EncoderOutputRemoved | AllEncoderOutputsCleared
CacheEvent = BlockEvent | OutputEvent


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Events of one message.

    ts: seconds since the epoch.
    events: in their order.
    data_parallel_rank: number of the engine among several behind one server.
    """

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode


def pack(batch: Batch) -> bytes:
    """Return a batch as msgpack."""
    return _encode(batch)


def unpack(data: bytes) -> Batch:
    """Return the batch in a message. Raises ValueError for anything else."""
    return _decode(data)


def pack_number(number: int) -> bytes:
    """Return the number of a message as it is sent."""
    return number.to_bytes(NUMBER_BYTES, "big")


def unpack_number(data: bytes) -> int:
    """Return the number of a message; -1 ends a replay. Raises ValueError for other than 8 bytes."""
    if len(data) != NUMBER_BYTES:
        raise ValueError(f"the number of a message has {len(data)} bytes; accepted: {NUMBER_BYTES}")
    return int.from_bytes(data, "big", signed=data == END)
