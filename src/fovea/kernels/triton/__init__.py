"""Kernels in Triton for CUDA: attention of decodes, norms, rotary embedding and gated activations."""
