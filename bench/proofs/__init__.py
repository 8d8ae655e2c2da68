"""The measured error rates of the check (docs/benchmarks/proofs.md): `python -m bench.proofs TABLE`."""
