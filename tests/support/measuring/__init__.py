"""Meters of memory, resources, stores and sketches."""
