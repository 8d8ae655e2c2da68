"""What a stranger can check from public objects alone: the state of a run, its chain, a ledger, one judgement. Imports
engine.
"""
