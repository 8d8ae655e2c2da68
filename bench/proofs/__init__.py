"""The measured error rates of the check of rollouts (docs/benchmarks/proofs.md): `python -m bench.proofs TABLE`."""
