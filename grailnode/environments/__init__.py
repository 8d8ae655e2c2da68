"""Environments that people bring as plug-ins, beside the built-in ones: their wheels, and their processes in the
sandbox (docs/guide/own-task.md). Imports protocol and the sandbox.
"""
