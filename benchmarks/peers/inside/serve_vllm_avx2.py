"""Run vLLM's command as on a CPU with AVX2 and without AVX-512, inside vLLM's venv.

    python serve_vllm_avx2.py serve MODEL ...

vLLM has kernels for both, in two libraries, and asks torch which one to load. It has no switch for that.
"""

import sys

import torch

HIDDEN = ("avx512", "avx10", "avx_vnni", "avx_ne_convert", "amx")
_capabilities = torch.cpu.get_capabilities


def get_capabilities():
    return {name: False if str(name).startswith(HIDDEN) else value for name, value in _capabilities().items()}


torch.cpu.get_capabilities = get_capabilities

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    sys.exit(main())
