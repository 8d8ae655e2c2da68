"""Public randomness from the world: drand relays, and a run's own beacon in its store. Imports protocol and
roles.ports.
"""
