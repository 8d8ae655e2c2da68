"""A node's operating system processes: what starts, supervises and wires them. Imports run, store, beacon, engine and
sandbox.
"""
