"""Compiled kernels and SIMD operations for the patch codec and the sampling check. Imports nothing of protocol."""
