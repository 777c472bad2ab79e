"""Kernels in Triton for CUDA: attention of decodes, norms, rotation, gated activations, packed weights."""
