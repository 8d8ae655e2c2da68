"""Judging: evidence, verdicts, and the ledger with its scores. Imports run, rollout and identity."""
