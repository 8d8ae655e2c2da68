"""The measured error rates of the check (docs/benchmarks.md, "Proofs"): `python -m bench.proofs TABLE`."""
