"""The rules that all nodes must compute alike. This package does no I/O and reads no clock, no environment variable and
no ambient randomness.
"""
