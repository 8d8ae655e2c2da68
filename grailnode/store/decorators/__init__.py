"""Stores that add something to another store: a cache, retries, limits, metrics, or routing by participant. Imports
protocol, roles.gather and roles.ports.
"""
