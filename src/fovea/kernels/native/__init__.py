"""Kernels in C++ for bfloat16 on CPUs and for pictures: sources, instruction sets, build, calls by ctypes."""
