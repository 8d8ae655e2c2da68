"""The one error tree of the protocol.

    ProtocolError              the peer is at fault: its bytes or claims break the rules
    ├── MalformedError         the bytes are not in the encoding that docs/spec defines
    ├── LimitError             the input is larger, longer or deeper than protocol/limits.py allows
    ├── SignatureError         the key that had to sign did not sign
    ├── AdmissionError         the run's authority does not admit the key
    ├── PairError              the run has no thresholds for how miner and validator compute
    ├── PatchError             a patch does not fit the weights it is applied to, or contradicts itself
    ├── ContributionError      a contribution does not fit the weights it starts from, or contradicts itself
    └── ChainError             a chain must not be followed
        ├── RollbackError      the chain is older than what this node already trusts
        ├── ForkError          there are two signed histories for one version
        ├── ExpiredError       nobody renewed the head in time
        └── GapError           an object that the chain needs is missing

A fault of our own (a wrong argument, a broken invariant) is a ValueError, TypeError or AssertionError, never one of
these.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ProtocolError(Exception):
    """The input is hostile or broken: `what` says how in one clear clause, in lower case, and `where` names the object,
    field or byte offset at fault; it is empty when the caller adds it.
    """

    def __init__(self, what: str, where: str = "") -> None:
        super().__init__(what, where)
        self.what = what
        self.where = where

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


@contextmanager
def error_context(place: object) -> Iterator[None]:
    """Put `place` in front of the location of every ProtocolError that is raised inside."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(error.what, f"{place}, {error.where}" if error.where else str(place)) from error


class MalformedError(ProtocolError):
    """The bytes are not in the encoding that docs/spec defines."""


class LimitError(ProtocolError):
    """The input is larger, longer or deeper than protocol/limits.py allows."""


class SignatureError(ProtocolError):
    """The key that had to sign did not sign, or nobody may use that key."""


class AdmissionError(ProtocolError):
    """The run's authority does not admit the key: it is revoked, not listed, or lacks the required credential."""


class PairError(ProtocolError):
    """The run has no thresholds for how miner and validator compute."""


class PatchError(ProtocolError):
    """A patch does not fit the weights it is applied to, or contradicts itself."""


class ContributionError(ProtocolError):
    """A contribution does not fit the weights that it starts from, or contradicts itself."""


class ChainError(ProtocolError):
    """A chain of manifests must not be followed."""


class RollbackError(ChainError):
    """The chain is older than what this node already trusts."""


class ForkError(ChainError):
    """There are two signed histories for one version."""


class ExpiredError(ChainError):
    """Nobody renewed the head in time: the storage may be showing an old one."""


class GapError(ChainError):
    """An object that the chain needs is missing."""
