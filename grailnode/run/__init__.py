"""Creating runs and joining them: manifest, keys, configuration, authority drafts and what a bucket needs. Imports
calibration, engine, sandbox, store and beacon, and never a running node.
"""
