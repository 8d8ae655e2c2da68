"""How rollouts are judged and what judgements earn: evidence, verdicts, the ledger. Imports run, rollout and identity."""
