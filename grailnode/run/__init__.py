"""Making runs and joining them: manifest, keys, configuration and what a bucket needs. Imports calibration, engine,
store and beacon, and never a running node.
"""
