"""Computes a policy: its checkpoint directory, the model, and the torch engine behind roles.ports.Engine. Imports no
other room of grailnode.
"""
