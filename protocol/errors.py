"""The one error tree of the protocol.

    ProtocolError              the peer's fault: bytes or claims that the rules refuse
    ├── MalformedError         not the encoding that docs/spec gives
    ├── LimitError             larger, longer or deeper than protocol/limits.py allows
    ├── SignatureError         not signed by the key that had to sign it
    ├── AdmissionError         a key that the run's authority does not admit
    ├── PatchError             a patch that does not fit the weights it is applied to, or itself
    └── ChainError             a chain that must not be followed
        ├── RollbackError      older than what this node already trusts
        ├── ForkError          two signed histories for one version
        ├── ExpiredError       a head that nobody renewed in time
        └── GapError           an object that the chain needs is not there

A fault of our own (a wrong argument, a broken invariant) is a ValueError, TypeError or AssertionError, never one of
these.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ProtocolError(Exception):
    """Hostile or broken input: says what is wrong and where.

    Args:
        what: one clear clause, in lower case.
        where: the object, field or byte offset it was found at; empty when the caller adds it.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what = what
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


@contextmanager
def found_in(place: object) -> Iterator[None]:
    """Let what goes wrong inside say where: in `place`."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(error.what, f"{place}, {error.where}" if error.where else str(place)) from error


class MalformedError(ProtocolError):
    """Not the encoding that docs/spec gives."""


class LimitError(ProtocolError):
    """Larger, longer or deeper than protocol/limits.py allows."""


class SignatureError(ProtocolError):
    """Not signed by the key that had to sign it, or a key that nobody may use."""


class AdmissionError(ProtocolError):
    """A key that the run's authority does not admit: revoked, not listed, or without the proof that it asks for."""


class PatchError(ProtocolError):
    """A patch that does not fit the weights it is applied to, or contradicts itself."""


class ChainError(ProtocolError):
    """A chain of manifests that must not be followed."""


class RollbackError(ChainError):
    """Older than what this node already trusts."""


class ForkError(ChainError):
    """Two signed histories for one version."""


class ExpiredError(ChainError):
    """A head that nobody renewed in time: the storage may be showing an old one."""


class GapError(ChainError):
    """An object that the chain needs is not there."""
