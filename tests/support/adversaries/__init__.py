"""Miners that cheat, a trained policy, and the harness in which the validator judges the miners.

`trading_task` is the task, and `trained_policy` makes a policy that has learned it. `harness` has one miner and one
validator. `miners` has the registry of adversaries that tests/adversaries and bench/proofs share.
"""
