"""Miners that cheat, a trained policy, and the harness in which the validator judges the miners.

`reinforcement` makes versions of a policy. `harness` has one miner and one validator. `miners` has the registry of
adversaries that tests/adversaries and bench/proofs share.
"""
