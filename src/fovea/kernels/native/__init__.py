"""Kernels in C++ for bfloat16 on CPUs with AVX-512: their sources, their build and their calls through ctypes."""
