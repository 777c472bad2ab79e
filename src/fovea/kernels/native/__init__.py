"""Kernels in C++ for bfloat16 on CPUs: sources, instruction sets, build, and calls through ctypes."""
