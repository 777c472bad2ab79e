"""Compile every Triton kernel for a Hopper GPU and print its name. This needs no GPU.

It runs as a separate process, because with TRITON_INTERPRET set, as in tests, kernels are never compiled.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fovea.kernels.triton import decode as triton_decode
from fovea.kernels.triton import rows as triton_rows

HOPPER = GPUTarget("cuda", 90, 32)
TILES = {"GROUP": 7, "TILE": 64, "DIM": 128, "SPLITS": 4}
KERNELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "norm": (
        triton_rows._rms_norm,
        "x delta weight total out:p width:i eps:f",
        {"WIDTH": 4096, "ADDS": False},
    ),
    "add and norm": (
        triton_rows._rms_norm,
        "x delta weight total out:p width:i eps:f",
        {"WIDTH": 4096, "ADDS": True},
    ),
    "silu": (triton_rows._silu_mul, "x out:p width:i", {"SIZE": 1024}),
    "rotate": (
        triton_rows._rotate_store,
        "qkv:p cos sin:w query_weight key_weight query kv:p slots:l heads kv_heads dim:i eps:f",
        {"DIM": 128, "NORMS": True},
    ),
    "decode": (
        triton_decode._own_split,
        "query kv:p tables lengths starts:l sums logs:w scale:f heads kv_heads dim block_size width:i",
        {**TILES, "M": 16, "SHARES": False},
    ),
    "decode after a share": (
        triton_decode._own_split,
        "query kv:p tables lengths starts:l sums logs:w scale:f heads kv_heads dim block_size width:i",
        {**TILES, "M": 16, "SHARES": True},
    ),
    "share": (
        triton_decode._shared_split,
        "query kv:p tables members prefixes:l sums logs:w scale:f heads kv_heads dim block_size width:i",
        {**TILES, "PADDED_GROUP": 8, "ROWS": 8, "M": 64},
    ),
    "merge": (triton_decode._merge, "sums logs:w out:p dim:i", {"SLOTS": 8, "DIM": 128}),
}  # fmt: skip
"""For each kernel: the function, its arguments, and its constants.

Arguments are names; `:` and a letter of TYPES gives the type of that name and of the names before it without
one.
"""
TYPES = {"p": "*bf16", "w": "*fp32", "l": "*i64", "i": "i32", "f": "fp32"}


def signature(arguments: str) -> dict[str, str]:
    types, names = {}, []
    for word in arguments.split():
        name, _, kind = word.partition(":")
        names.append(name)
        if kind:
            types |= dict.fromkeys(names, TYPES[kind])
            names = []
    return types


def main() -> None:
    for title, (kernel, arguments, constants) in KERNELS.items():
        types = signature(arguments) | dict.fromkeys(constants, "constexpr")
        ordered = {name: types[name] for name in kernel.arg_names}
        source = ASTSource(kernel, signature=ordered, constexprs=constants)
        kernel_binary = triton.compile(source, target=HOPPER)
        assert kernel_binary.asm["cubin"]
        print(f"{title}: {kernel_binary.metadata.shared} bytes of shared memory")


if __name__ == "__main__":
    main()
