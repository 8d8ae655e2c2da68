"""Programs that try to cheat, a policy worth cheating on, and the field where they meet the validator.

`stories` is the task and `model` the policy that learned it; `field` holds one honest miner and one validator;
`animals` is the registry of cheats that tests/zoo and bench/proofs.py share.
"""
