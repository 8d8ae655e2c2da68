"""Compiled loops that the patch codec and the sampling check share. Imports nothing of protocol."""
