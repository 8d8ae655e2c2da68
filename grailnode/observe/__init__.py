"""Reads and checks a run as any stranger can, from public objects alone: its state, its chain, a ledger, one judgement.
Imports engine.
"""
