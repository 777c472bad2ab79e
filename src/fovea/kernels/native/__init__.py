"""Kernels in C++ for bfloat16 on CPUs with AVX-512: sources, build, and calls through ctypes."""
