"""Reads and writes weight updates in the formats of other projects, without any loss. Imports no other room of
grailnode.

These formats lack the digests of the base and of the result; they are computed when an update is read. Every conversion
to or from a patch needs the base weights.
"""
