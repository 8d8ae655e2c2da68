"""Tasks with verifiable rewards: a seed names a problem, a completion earns a reward. Deterministic functions, no I/O."""
