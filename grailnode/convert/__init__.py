"""Reads and writes weight updates in the formats of other projects, without any loss. Imports no other room of
grailnode.

These formats lack the digests of the base and of the result; they are computed when an update is read. Every conversion
to or from a patch needs the base weights.
"""

from grailnode.convert.slime import read_slime, write_slime
from grailnode.convert.trl import read_trl, write_trl

__all__ = ["read_slime", "read_trl", "write_slime", "write_trl"]
