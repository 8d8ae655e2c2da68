"""Other people's formats for weight updates: read and written, bit for bit.

What they lack (the base version's digest, the result's) comes from our manifest when one of theirs is written, and is
computed when one is read; a patch of ours needs the base weights in either direction.
"""

from grailnode.convert.slime import read_slime, write_slime
from grailnode.convert.trl import read_trl, write_trl

__all__ = ["read_slime", "read_trl", "write_slime", "write_trl"]
