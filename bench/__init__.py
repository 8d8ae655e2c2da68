"""Measurements behind the choices in docs/: run as `python -m bench.NAME`."""
