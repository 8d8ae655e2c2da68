"""Benchmarks behind the figures and choices in docs/: each runs as `python -m bench.NAME` and has `--help`."""
