"""The vLLM engine beside plain vLLM and the torch engine: `python -m bench.engines`, docs/benchmarks/engines.md."""
