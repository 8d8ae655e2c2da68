"""Obtains public randomness from drand relays or from a run's own beacon, and publishes the latter. Imports protocol
and roles.ports.
"""
