"""The envelope around each object of a node's state: its name, length and digest (docs/guide/operate.md).

    magic            8 bytes
    form             4 bytes, little-endian: the version of the form of this state
    length of path   4 bytes
    length of data   8 bytes
    run              32 bytes: the run's id
    digest of data   32 bytes: BLAKE3
    path             UTF-8
    digest           32 bytes: BLAKE3 of everything before it
    data

Every form has the same envelope. The digest of the envelope is checked first, so that a damaged form number is not
mistaken for another version of the program.
"""

import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

FORM: Final = 1
"""The version of the form of the state: of its paths, and of the objects at them."""

_MAGIC: Final = b"grailst\n"
_fixed: Final = struct.Struct("<8sIIQ32s32s")
_DIGEST_BYTES: Final = 32
_INLINE_BYTES: Final = 1 << 20  # larger data are hashed on several threads


class DamageError(Exception):
    """A file of a state is not what it should be; the text says why."""


class ForeignError(DamageError):
    """A file is whole, but it is of another run, or of another version of this program."""


@dataclass(frozen=True)
class Envelope:
    """What an envelope says."""

    path: str  # of the object
    run: bytes  # id of the run
    length: int  # of the object's data, in bytes
    digest: bytes  # BLAKE3 of the data

    def check_place(self, path: str, run: bytes) -> None:
        """Raise DamageError if a file holds another object than that of its path, ForeignError if of another run."""
        if self.path != path:
            raise DamageError(f"holds another object, {self.path}")
        if self.run != run:
            raise ForeignError(f"is of another run, {self.run.hex()}")


def header_size(path: str) -> int:
    """Return the bytes of the envelope before the data of an object."""
    return _fixed.size + len(path.encode()) + _DIGEST_BYTES


def data_digest(data: bytes) -> bytes:
    """Return the BLAKE3 of data (32 bytes); large data are hashed on several threads."""
    return blake3(max_threads=blake3.AUTO if len(data) > _INLINE_BYTES else 1).update(data).digest()


def encode(path: str, run: bytes, data: bytes) -> bytes:
    """Return the envelope of an object, to be written before its data."""
    name = path.encode()
    head = _fixed.pack(_MAGIC, FORM, len(name), len(data), run, data_digest(data)) + name
    return head + blake3(head).digest()


def decode(head: bytes, file_size: int) -> Envelope:
    """Return what the envelope of a file of so many bytes says, checked against itself and that size.

    `head` is the beginning of the file: all of its envelope, or all of the file if it is shorter. DamageError if the
    file does not hold an object whole, ForeignError if another version of this program wrote it.
    """
    if not file_size:
        raise DamageError("empty")
    if not head.startswith(_MAGIC):
        raise DamageError(
            "has no envelope: its beginning is damaged, or another version of this program wrote it, whose state this "
            "one does not read"
        )
    if len(head) < _fixed.size:
        raise DamageError(f"cut off after {file_size} bytes")
    _, form, name_length, length, run, digest = _fixed.unpack_from(head)
    end = _fixed.size + name_length
    if head[end : end + _DIGEST_BYTES] != blake3(head[:end]).digest():
        raise DamageError("damaged in its envelope, cut off there, or the file of another object")
    if form != FORM:
        raise ForeignError(
            f"of form {form}, which another version of this program wrote; this one reads form {FORM}, so start the "
            "version that wrote it"
        )
    if end + _DIGEST_BYTES + length != file_size:
        raise DamageError(f"{file_size} bytes long instead of {end + _DIGEST_BYTES + length}")
    return Envelope(head[_fixed.size : end].decode(), run, length, digest)
