"""Runs inside the sandbox, where this folder is mounted without the rest of the program. Imports the standard library
only.
"""
